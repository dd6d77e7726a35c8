"""Engram: hashed n-gram memory read at the entry of a few layers.

Letters: T tokens, n longest n-gram, c hash columns, C streams, D hidden, S slots, R ring size.
"""

import torch
from torch import Tensor

from graphs.op import EXACT, Tolerance, op
from graphs.ops.quant import GROUP, decode_e8m0
from graphs.ops.rows import look_back


def _sample_rows(seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 90, (6,), generator=generator, dtype=torch.int32)
    history = torch.randint(0, 90, (3, 9), generator=generator, dtype=torch.int32)
    positions = torch.tensor([3, 4, 5, 0, 1, 0], dtype=torch.int32)
    slots = torch.tensor([1, 1, 1, 2, 2, 0], dtype=torch.int32)
    starts = torch.tensor([3, 3, 3, 0, 0, 0], dtype=torch.int32)
    multipliers = torch.randint(0, 2**40, (4,), generator=generator) * 2 + 1
    primes = torch.tensor([61, 67, 71, 73, 79, 83]).view(3, 2)
    offsets = torch.arange(6) * 100
    return ids, history, positions, slots, starts, multipliers, primes, offsets, torch.tensor(2)


@op(
    shape=lambda ids, history, positions, slots, starts, multipliers, primes, offsets, pad: (
        multipliers.new_empty((ids.shape[0], offsets.shape[0]))
    ),
    samples=_sample_rows,
    tolerance=EXACT,
)
def engram_rows(
    ids_T: Tensor,
    history_SR: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    chunk_starts_T: Tensor,
    multipliers_n: Tensor,
    primes_xh: Tensor,
    offsets_c: Tensor,
    pad: Tensor,
) -> Tensor:
    """Hash each token's n-grams to rows of one layer's table.

    Args:
        ids_T: compressed ids of this step, int32 [num_tokens].
        history_SR: compressed ids of earlier positions, int32 [num_slots, ring_size].
        positions_T, slots_T, chunk_starts_T: int32 [num_tokens].
        multipliers_n: int64 [n].
        primes_xh: int64 [n - 1, heads].
        offsets_c: int64 [columns], columns = (n - 1) * heads.
        pad: compressed id that stands before the start of a sequence, int64 scalar.
    Returns:
        int64 [num_tokens, columns].
    Source: model.md 5.2.
    """
    count = multipliers_n.shape[0]
    rows = slice(0, ids_T.shape[0])
    ascending, valid = look_back(
        ids_T, history_SR, positions_T, slots_T, chunk_starts_T, count, rows
    )
    tokens = torch.where(valid, ascending.long(), pad).flip(-1)  # [T, n], the token itself first
    products = tokens * multipliers_n
    mixed = products[:, 0]
    columns = []
    for i in range(1, count):
        mixed = mixed ^ products[:, i]
        columns.append(mixed.unsqueeze(-1) % primes_xh[i - 1])
    return torch.cat(columns, -1) + offsets_c


def _sample_lookup(seed: int) -> tuple[Tensor, Tensor, Tensor | None, torch.dtype]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 40, (5, 6), generator=generator)
    table = torch.randn(40, 64, generator=generator)
    if seed % 2 == 0:
        return rows, table, None, torch.float32
    scale = torch.randint(118, 124, (40, 2), generator=generator).to(torch.uint8)
    return rows, table.to(torch.float8_e4m3fn), scale, torch.bfloat16


@op(
    shape=lambda rows, table, scale, out_dtype: table.new_empty(
        (rows.shape[0], rows.shape[1] * table.shape[1]), dtype=out_dtype
    ),
    samples=_sample_lookup,
    tolerance=EXACT,
)
def engram_lookup(
    rows_Tc: Tensor, table: Tensor, scale: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """Fetch and decode table rows.

    Args:
        rows_Tc: int64 [num_tokens, columns].
        table: [num_rows, d], float8_e4m3fn or plain; may be memory-mapped.
        scale: E8M0 bytes per row and 32 channels, uint8 [num_rows, d / 32]; None for a plain table.
        out_dtype: dtype of the result; the values are exact in bfloat16.
    Returns:
        [num_tokens, columns * d].
    Source: model.md 5.3.
    """
    values = table[rows_Tc].float()
    if scale is not None:
        grouped = values.unflatten(-1, (-1, GROUP))
        values = (grouped * decode_e8m0(scale[rows_Tc]).unsqueeze(-1)).flatten(-2)
    return values.flatten(1).to(out_dtype)


def _sample_gate(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    generator = torch.Generator().manual_seed(seed)
    streams, kv = (torch.randn(s, generator=generator) for s in ((7, 4, 32), (7, 160)))
    query_weight, key_weight = (torch.randn(4, 32, generator=generator) for _ in range(2))
    return streams, kv, query_weight, key_weight, 1e-20


@op(
    shape=lambda streams, kv, query_weight, key_weight, eps: (
        torch.empty_like(streams),
        streams.new_empty(streams.shape[:2], dtype=torch.float32),
    ),
    samples=_sample_gate,
    tolerance=Tolerance(2e-2, 1e-2),
)
def engram_gate(
    streams_TCD: Tensor,
    kv_TX: Tensor,
    query_weight_CD: Tensor,
    key_weight_CD: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Add the memory's value to every stream, gated by how well the stream matches its key.

    Args:
        streams_TCD: [num_tokens, C, D], bfloat16 or float32.
        kv_TX: projected memory, [num_tokens, (C + 1) * D]: C keys, then one value.
        query_weight_CD, key_weight_CD: norm weights, [C, D].
        eps: of both norms.
    Returns:
        streams [num_tokens, C, D], dtype of the input; gate float32 [num_tokens, C].
    Numerics: float32, one rounding.
    Source: model.md 5.3.
    """
    num_streams, hidden = streams_TCD.shape[1:]
    streams = streams_TCD.float()
    key, value = kv_TX.float().split((num_streams * hidden, hidden), -1)
    key = key.unflatten(-1, (num_streams, hidden))
    weight = query_weight_CD.float() * key_weight_CD.float()

    def inverse_rms(x: Tensor) -> Tensor:
        return torch.rsqrt((x.double() ** 2).mean(-1).float() + eps)

    dot = (streams * weight * key).double().sum(-1).float()
    dot = dot * (inverse_rms(streams) * inverse_rms(key)) * hidden**-0.5
    root = torch.copysign(dot.abs().clamp(min=1e-6).sqrt(), dot)
    gate = torch.sigmoid(root.double()).float()
    mixed = streams + gate.unsqueeze(-1) * value.unsqueeze(1)
    return mixed.to(streams_TCD.dtype), gate
