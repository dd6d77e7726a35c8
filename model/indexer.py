"""Selection of compressed entries on index source layers (model.md 3.5 - 3.7).

Letters: T tokens, D hidden, h index heads, d index head channels.
"""

from torch import Tensor

from graphs.ops import (
    apply_rope,
    fake_quantize,
    index_scores,
    select_candidate_blocks,
    select_entries,
)
from model.compressor import store_entries
from model.layer import LayerSpec
from model.scope import Scope


def store_index_keys(scope: Scope, latent_TL: Tensor, ratio: int) -> None:
    """Derive this step's index keys from the compressor's latents and store them."""
    key = scope.norm("attn.indexer.k_norm", scope.linear("attn.indexer.wk", latent_TL))
    store_entries(scope, "index_key", apply_rope(key, scope["rope_group"], False), "fp4_32", ratio)


def select(
    scope: Scope, layer: LayerSpec, x_TD: Tensor, query_latent: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Score the visible entries and select the best.

    Args:
        scope: holds attn.indexer.*, cache.index_key, candidates where the layer reads them.
        layer: kind of the layer.
        x_TD: normalised attention input, [num_tokens, hidden].
        query_latent: normalised low-rank query, [num_tokens, q_lora_rank].
    Returns:
        indices int32 [num_tokens, index_topk]; candidate blocks where the layer makes them, else
        None.
    """
    config = scope.config
    query = scope.linear("attn.indexer.wq_b", query_latent)
    query = query.unflatten(-1, (config.index_n_heads, config.index_head_dim))
    query = apply_rope(query, scope["rope"], False)
    if scope.compile_config.cache_quant:
        query = fake_quantize(query, "fp4_32")
    weights = scope.linear("attn.indexer.weights_proj", x_TD)
    positions, slots = scope["positions"], scope["slots"]
    scores = index_scores(
        query,
        weights,
        scope["cache.index_key"],
        scope["block_table"],
        slots,
        positions,
        layer.ratio,
    )
    scope.tap("index_scores", scores)
    made = None
    if layer.makes_candidates:
        made = select_candidate_blocks(
            scores,
            positions,
            slots,
            layer.ratio,
            config.candidate_topk_blocks,
            config.candidate_block_size,
        )
        scope.tap("candidate_blocks", made)
    read = scope["candidates"] if layer.reads_candidates else None
    indices = select_entries(scores, config.index_topk, read, config.candidate_block_size)
    scope.tap("topk_indices", indices)
    return indices, made
