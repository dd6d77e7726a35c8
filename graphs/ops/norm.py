"""RMS normalisation."""

import torch
from torch import Tensor

from graphs.op import Tolerance, op
from graphs.ops.rows import sum_exact


def _sample(seed: int) -> tuple[Tensor, Tensor, float]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(9, 96, generator=generator) * 3
    return x, torch.randn(96, generator=generator), 1e-20


@op(
    shape=lambda x, weight, eps: torch.empty_like(x),
    samples=_sample,
    tolerance=Tolerance(1e-2, 1e-2),
)
def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Divide each row by its root mean square and scale it.

    Args:
        x_TD: [num_tokens, D], bfloat16 or float32.
        weight_D: [D], bfloat16 or float32, applied as it is (never 1 + weight).
        eps: added to the mean square; 1e-20 in the text model.
    Returns:
        [num_tokens, D], dtype of x.
    Numerics: float32, one rounding at the end.
    Source: model.md 2.1.
    """
    x = x_TD.float()
    mean_square = sum_exact(x * x, -1) / x.shape[-1]
    scaled = x * torch.rsqrt(mean_square + eps).unsqueeze(-1)
    return (weight_D.float() * scaled).to(x_TD.dtype)
