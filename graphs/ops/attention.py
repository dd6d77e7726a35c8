"""One softmax over the sliding window and the selected compressed entries.

Letters: T tokens, H heads, D head channels, W window, k selected entries.
"""

import torch
from torch import Tensor

from graphs.op import Tolerance, op
from graphs.ops.cache import block_entry
from graphs.ops.quant import unpack_records
from graphs.ops.rows import look_back, multiply_exact, token_blocks


def _sample(seed: int) -> tuple[object, ...]:
    generator = torch.Generator().manual_seed(seed)
    query, kv = (torch.randn(s, generator=generator) for s in ((6, 4, 32), (6, 32)))
    ring, cache = (torch.randn(s, generator=generator) for s in ((3, 11, 32), (6, 4, 32)))
    indices = torch.tensor([[0, 2, -1], [0, 1, 2], [1, 2, 3], [0, -1, -1], [0, 1, -1], [-1] * 3])
    table = torch.tensor([[0, 0], [3, 1], [5, 2]], dtype=torch.int32)
    positions = torch.tensor([9, 10, 11, 0, 1, 0], dtype=torch.int32)
    slots = torch.tensor([1, 1, 1, 2, 2, 0], dtype=torch.int32)
    starts = torch.tensor([9, 9, 9, 0, 0, 0], dtype=torch.int32)
    sink = torch.randn(4, generator=generator)
    selected = (cache, indices.int()) if seed % 2 else (None, None)
    return query, kv, ring, *selected, table, slots, positions, starts, sink, 5, 32**-0.5


def _selected_keys(
    cache: Tensor, indices_Tk: Tensor, block_table: Tensor, slots_T: Tensor
) -> tuple[Tensor, Tensor]:
    valid = indices_Tk >= 0
    block, offset = block_entry(indices_Tk.clamp(min=0), slots_T, block_table, cache.shape[1])
    keys = unpack_records(cache[block, offset], "fp4_16")
    return torch.where(valid.unsqueeze(-1), keys, 0.0), valid


def _attend(
    query_THD: Tensor, keys_TKD: Tensor, valid_TK: Tensor, sink_H: Tensor, scale: float
) -> Tensor:
    dtype = query_THD.dtype
    scores = multiply_exact(query_THD, keys_TKD.transpose(1, 2)) * scale
    scores = scores.masked_fill(~valid_TK.unsqueeze(1), -torch.inf)
    largest = scores.amax(-1, keepdim=True)
    weights = torch.exp((scores - largest).double())
    total = weights.sum(-1) + torch.exp((sink_H - largest.squeeze(-1)).double())
    rounded = (
        weights.float().to(dtype).float()
    )  # contract A rounds probabilities to the stream dtype
    return (multiply_exact(rounded, keys_TKD) / total.float().unsqueeze(-1)).to(dtype)


@op(
    shape=lambda query, *_: torch.empty_like(query),
    samples=_sample,
    tolerance=Tolerance(2e-2, 1e-2),
)
def sparse_attention(
    query_THD: Tensor,
    step_kv: Tensor,
    window_cache: Tensor,
    compressed_cache: Tensor | None,
    indices_Tk: Tensor | None,
    block_table: Tensor,
    slots_T: Tensor,
    positions_T: Tensor,
    chunk_starts_T: Tensor,
    sink_H: Tensor,
    window: int,
    scale: float,
) -> Tensor:
    """Attend over the last `window` tokens and the selected compressed entries; keys are the
    values.

    Args:
        query_THD: rotated queries, [num_tokens, heads, D].
        step_kv: latents of this step's tokens in cache form, [num_tokens, D or record bytes].
        window_cache: ring of earlier latents, [num_slots, ring_size, D or record bytes]; not yet
            holding this step.
        compressed_cache: [num_blocks, entries_per_block, D or record bytes], this step's entries
            included; None on
            window-only layers.
        indices_Tk: selected entries, int32 [num_tokens, k], -1 = none; None on window-only layers.
        block_table: int32 [num_slots, max_blocks].
        slots_T, positions_T, chunk_starts_T: int32 [num_tokens].
        sink_H: float32 [heads], a logit that only enters the denominator.
        window: keys of the window, the token itself included.
        scale: of the logits, head_dim ** -0.5.
    Returns:
        [num_tokens, heads, D], dtype of the query; the rotation of the tail is still in it.
    Numerics: float32 logits; probabilities rounded to the dtype of the query, their sum not.
    Source: model.md 3.3, 3.9.
    """
    out = torch.empty_like(query_THD)
    for rows in token_blocks(query_THD.shape[0]):
        latents, valid = look_back(
            step_kv, window_cache, positions_T, slots_T, chunk_starts_T, window, rows
        )
        keys = unpack_records(latents, "fp8_32")
        if compressed_cache is not None and indices_Tk is not None:
            more, more_valid = _selected_keys(
                compressed_cache, indices_Tk[rows], block_table, slots_T[rows]
            )
            keys, valid = torch.cat((keys, more), 1), torch.cat((valid, more_valid), 1)
        out[rows] = _attend(query_THD[rows], keys, valid, sink_H, scale)
    return out
