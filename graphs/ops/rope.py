"""Rotary position embedding: interleaved pairs in the last channels.

Letters: T tokens, F rotated pairs.
"""

import torch
from torch import Tensor

from graphs.op import Tolerance, op


def _sample_table(seed: int) -> tuple[Tensor, Tensor, int]:
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(0, 100_000, (9,), generator=generator, dtype=torch.int32)
    return positions, torch.rand(16, generator=generator), 1 + seed % 2


@op(
    shape=lambda positions, inv_freq, group: inv_freq.new_empty(
        (positions.shape[0], 2, inv_freq.shape[0])
    ),
    samples=_sample_table,
)
def rope_table(positions_T: Tensor, inv_freq_F: Tensor, group: int) -> Tensor:
    """Compute cosines and sines of each token's angles.

    Args:
        positions_T: absolute positions, int32 [num_tokens].
        inv_freq_F: inverse frequencies, float32 [pairs].
        group: tokens per compressed entry; the angle is that of the first position of the token's
            group.
    Returns:
        float32 [num_tokens, 2, pairs]: cosines, then sines.
    Numerics: the angle is the rounded float32 product; its cosine and sine are correctly rounded.
    Source: model.md 3.2.
    """
    first = (positions_T // group * group).float()
    angles = (first.unsqueeze(-1) * inv_freq_F).double()
    return torch.stack((angles.cos(), angles.sin()), 1).float()


def _sample_apply(seed: int) -> tuple[Tensor, Tensor, bool]:
    generator = torch.Generator().manual_seed(seed)
    shape = ((9, 64), (9, 4, 64))[seed % 2]
    angles = torch.randn(9, 16, generator=generator)
    table = torch.stack((angles.cos(), angles.sin()), 1)
    return torch.randn(shape, generator=generator), table, seed % 3 == 0


@op(
    shape=lambda x, table, inverse: torch.empty_like(x),
    samples=_sample_apply,
    tolerance=Tolerance(1e-2, 1e-2),
)
def apply_rope(x: Tensor, table: Tensor, inverse: bool) -> Tensor:
    """Rotate the last 2 * pairs channels.

    Args:
        x: [num_tokens, D] or [num_tokens, heads, D], bfloat16 or float32.
        table: float32 [num_tokens, 2, pairs].
        inverse: rotate back (attention output).
    Returns:
        Same shape and dtype as x; pair i = channels (2i, 2i + 1) of the tail.
    Numerics: float32, one rounding.
    Source: model.md 3.2.
    """
    cos, sin = table.unbind(1)
    if inverse:
        sin = -sin
    if x.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    num_rotated = 2 * table.shape[-1]
    head, tail = x[..., :-num_rotated], x[..., -num_rotated:].float()
    even, odd = tail[..., 0::2], tail[..., 1::2]
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((head, rotated.to(x.dtype)), -1)
