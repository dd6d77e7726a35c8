"""The vocabulary of graphs: every named op beside its plain-PyTorch reference body."""

from graphs.ops.attention import sparse_attention
from graphs.ops.cache import write_blocks, write_ring
from graphs.ops.communication import combine_experts, dispatch_experts
from graphs.ops.compress import pool_groups
from graphs.ops.embedding import embed_streams, select_rows
from graphs.ops.engram import engram_gate, engram_lookup, engram_rows
from graphs.ops.hyper_connection import hc_mixes, hc_post, hc_pre
from graphs.ops.indexer import index_scores, select_candidate_blocks, select_entries
from graphs.ops.linear import grouped_linear, linear
from graphs.ops.logits import constrain_logits, penalize_logits, top_logprobs
from graphs.ops.moe import route_experts, routed_experts, swiglu
from graphs.ops.norm import rms_norm
from graphs.ops.quant import fake_quantize, pack_records
from graphs.ops.rope import apply_rope, rope_table
from graphs.ops.sampling import sample_tokens, token_logprobs

__all__ = [
    "apply_rope",
    "combine_experts",
    "constrain_logits",
    "dispatch_experts",
    "embed_streams",
    "engram_gate",
    "engram_lookup",
    "engram_rows",
    "fake_quantize",
    "grouped_linear",
    "hc_mixes",
    "hc_post",
    "hc_pre",
    "index_scores",
    "linear",
    "pack_records",
    "penalize_logits",
    "pool_groups",
    "rms_norm",
    "rope_table",
    "apply_rope",
    "route_experts",
    "routed_experts",
    "sample_tokens",
    "select_candidate_blocks",
    "select_entries",
    "select_rows",
    "sparse_attention",
    "swiglu",
    "token_logprobs",
    "top_logprobs",
    "write_blocks",
    "write_ring",
]
