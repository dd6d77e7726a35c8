"""Compressed entries of the key/value cache, made on key/value source layers (model.md 3.4).

Letters: T tokens, D hidden, L head_dim.
"""

import torch
from torch import Tensor

from graphs.ops import (
    apply_rope,
    fake_quantize,
    pack_records,
    pool_groups,
    write_blocks,
    write_ring,
)
from model.scope import Scope


def compress(scope: Scope, x_TD: Tensor, ratio: int) -> Tensor:
    """Compute this step's entries, store them, and return their latents.

    Args:
        scope: holds attn.compressor.*, cache.compressed, cache.raw (ratio > 1) and the step inputs.
        x_TD: normalised attention input, [num_tokens, hidden].
        ratio: tokens per entry.
    Returns:
        [num_tokens, head_dim] before rotation and quantisation; meaningful where a token ends its
        group.
    """
    name = "attn.compressor"
    if ratio == 1:
        pooled = scope.linear(f"{name}.wkv", x_TD)
    else:
        raw = torch.cat(
            [scope.linear(f"{name}.{part}", x_TD, torch.float32) for part in ("wkv", "wgate")], -1
        )
        positions, slots, ring = scope["positions"], scope["slots"], scope["cache.raw"]
        pooled = pool_groups(
            raw, ring, positions, slots, scope["chunk_starts"], ratio, scope.act_dtype
        )
        write_ring(ring, raw, positions, slots, scope["chunk_ends"])
    latent = scope.norm(f"{name}.norm", pooled)
    entry = apply_rope(latent, scope["rope_group"], False)
    store_entries(scope, "compressed", entry, "fp4_16", ratio)
    return latent


def store_entries(scope: Scope, name: str, entry: Tensor, fmt: str, ratio: int) -> None:
    """Write entries to the block cache `name` in the form the numerics ask for, and tap them."""
    quantised = scope.compile_config.cache_quant
    write_blocks(
        scope[f"cache.{name}"],
        pack_records(entry, fmt) if quantised else entry,
        scope["positions"],
        scope["slots"],
        scope["block_table"],
        ratio,
    )
    if scope.taps is not None:
        tap = {"compressed": "compressed_kv", "index_key": "index_k"}[name]
        scope.tap(tap, fake_quantize(entry, fmt) if quantised else entry.clone())
