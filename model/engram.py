"""Engram memory: n-gram rows for the whole step, and their injection at a layer's entry (model.md
5)."""

from torch import Tensor

from graphs.ops import engram_gate, engram_lookup, engram_rows, select_rows, write_ring
from model.scope import Scope


def hash_rows(scope: Scope) -> list[Tensor]:
    """Hash every token's n-grams and remember the tokens.

    Returns:
        int64 [num_tokens, columns] for each Engram layer.
    """
    ids = select_rows(scope["engram.token_map"], scope["token_ids"])
    history, positions, slots = scope["cache.history"], scope["positions"], scope["slots"]
    rows = [
        engram_rows(
            ids,
            history,
            positions,
            slots,
            scope["chunk_starts"],
            scope[f"engram.multipliers.{index}"],
            scope[f"engram.primes.{index}"],
            scope[f"engram.offsets.{index}"],
            scope["engram.pad"],
        )
        for index in range(len(scope.config.engram_layer_ids))
    ]
    write_ring(history, ids, positions, slots, scope["chunk_ends"])
    return rows


def inject(scope: Scope, streams_TCD: Tensor) -> Tensor:
    """Add the memory to the streams [num_tokens, hc_mult, hidden] at the entry of a layer."""
    table, scale = scope.weight("engram.embed")
    memory = engram_lookup(scope["engram_rows"], table, scale, scope.act_dtype)
    streams, gate = engram_gate(
        streams_TCD,
        scope.linear("engram.wkv", memory),
        scope["engram.q_weight"],
        scope["engram.k_weight"],
        scope.config.rms_norm_eps,
    )
    scope.tap("engram_gate", gate)
    scope.tap("engram_out", streams)
    return streams
