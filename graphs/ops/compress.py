"""Pooling of token groups into compressed entries.

Letters: T tokens, D channels, S slots, R ring size.
"""

import torch
from torch import Tensor

from graphs.op import FP32_CLOSE, op
from graphs.ops.rows import look_back, sum_exact


def _sample(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int, torch.dtype]:
    generator = torch.Generator().manual_seed(seed)
    raw, ring = (torch.randn(s, generator=generator) for s in ((6, 64), (3, 7, 64)))
    positions = torch.tensor([3, 4, 5, 0, 1, 0], dtype=torch.int32)
    slots = torch.tensor([1, 1, 1, 2, 2, 0], dtype=torch.int32)
    starts = torch.tensor([3, 3, 3, 0, 0, 0], dtype=torch.int32)
    return raw, ring, positions, slots, starts, 2, torch.float32


@op(
    shape=lambda raw, ring, positions, slots, chunk_starts, ratio, out_dtype: raw.new_empty(
        (raw.shape[0], raw.shape[1] // 2), dtype=out_dtype
    ),
    samples=_sample,
    tolerance=FP32_CLOSE,
)
def pool_groups(
    raw_TX: Tensor,
    ring_SRX: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    chunk_starts_T: Tensor,
    ratio: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """Pool each token with the ratio - 1 tokens before it by a softmax over their gates, per
    channel.

    Args:
        raw_TX: value and gate rows of this step, float32 [num_tokens, 2 * D].
        ring_SRX: rows of earlier positions, float32 [num_slots, ring_size, 2 * D].
        positions_T, slots_T, chunk_starts_T: int32 [num_tokens].
        ratio: tokens per group.
        out_dtype: dtype of the latent.
    Returns:
        [num_tokens, D]; meaningful for tokens that end a group.
    Numerics: float32 in, softmax and sum rounded once.
    Source: model.md 3.4.
    """
    rows = slice(0, raw_TX.shape[0])
    group, _ = look_back(raw_TX, ring_SRX, positions_T, slots_T, chunk_starts_T, ratio, rows)
    value, gate = group.chunk(2, -1)
    weight = torch.softmax(gate.double(), 1).float()
    return sum_exact(weight * value, 1).to(out_dtype)
