"""Attention of one layer: shared latent, sliding window plus selected entries, grouped output
(model.md 3).

Letters: T tokens, D hidden, H heads, L head_dim.
"""

from torch import Tensor

from graphs.ops import apply_rope, grouped_linear, pack_records, sparse_attention, write_ring
from model.compressor import compress
from model.indexer import select, store_index_keys
from model.layer import LayerSpec
from model.scope import Scope


def attention(
    scope: Scope, layer: LayerSpec, x_TD: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Attend from every token of the step.

    Args:
        scope: holds attn.*, the layer's caches and the step inputs; `indices` where the layer does
            not select.
        layer: kind of the layer.
        x_TD: normalised input, [num_tokens, hidden].
    Returns:
        output [num_tokens, hidden]; new indices and new candidates, None where the layer makes
        none.
    """
    config = scope.config
    query_latent = scope.norm("attn.q_norm", scope.linear("attn.wq_a", x_TD))
    query_THL = scope.linear("attn.wq_b", query_latent)
    query_THL = query_THL.unflatten(-1, (config.num_attention_heads, config.head_dim))
    query_THL = apply_rope(query_THL, scope["rope"], False)
    kv_TL = scope.norm("attn.kv_norm", scope.linear("attn.wkv", x_TD))
    kv_TL = apply_rope(kv_TL, scope["rope"], False)
    if scope.compile_config.cache_quant:
        kv_TL = pack_records(kv_TL, "fp8_32")

    if layer.is_kv_source:
        store_index_keys(scope, compress(scope, x_TD, layer.ratio), layer.ratio)
    new_indices = new_candidates = None
    if layer.is_index_source:
        new_indices, new_candidates = select(scope, layer, x_TD, query_latent)

    out_THL = _attend(scope, layer, query_THL, kv_TL, new_indices)
    out_THL = apply_rope(out_THL, scope["rope"], True)
    grouped = out_THL.flatten(1).unflatten(-1, (config.o_groups, -1))
    low_rank = grouped_linear(grouped, *scope.weight("attn.wo_a"))
    return scope.linear("attn.wo_b", low_rank), new_indices, new_candidates


def _attend(
    scope: Scope, layer: LayerSpec, query_THL: Tensor, kv_TL: Tensor, new_indices: Tensor | None
) -> Tensor:
    config, ring = scope.config, scope["cache.window"]
    positions, slots = scope["positions"], scope["slots"]
    indices = None
    if layer.ratio:
        indices = scope["indices"] if new_indices is None else new_indices
    out = sparse_attention(
        query_THL,
        kv_TL,
        ring,
        scope["cache.compressed"] if layer.ratio else None,
        indices,
        scope["block_table"],
        slots,
        positions,
        scope["chunk_starts"],
        scope["attn.attn_sink"],
        config.sliding_window,
        config.head_dim**-0.5,
    )
    # The ring is written after it is read: a chunk's early tokens still need what its late ones
    # replace.
    write_ring(ring, kv_TL, positions, slots, scope["chunk_ends"])
    return out
