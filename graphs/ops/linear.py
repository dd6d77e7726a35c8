"""Linear layers over plain, FP8 and FP4 weights.

Letters: T tokens, K in, N out, G groups.
"""

import torch
from torch import Tensor

from graphs.op import Tolerance, op
from graphs.ops.quant import dequantize_weight, quantize_dequantize
from graphs.ops.rows import matmul_rows


def linear_float32(x: Tensor, weight: Tensor, scale: Tensor | None, act_quant: bool) -> Tensor:
    """Body shared by the ops that multiply by checkpoint weights; float32 in the middle and out."""
    value = x.float()
    if act_quant and scale is not None:
        value = quantize_dequantize(value, "fp8_32")
    return matmul_rows(value, dequantize_weight(weight, scale))


def sample_weight(seed: int, num_out: int, num_in: int, kind: str) -> tuple[Tensor, Tensor | None]:
    """Return random weights of a storage kind ("plain", "fp8" or "fp4") with their scales."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "plain":
        return torch.randn(num_out, num_in, generator=generator) * num_in**-0.5, None
    rows = num_out if kind == "fp4" else -(-num_out // 32)
    scale = torch.randint(118, 124, (rows, -(-num_in // 32)), generator=generator).to(torch.uint8)
    if kind == "fp4":
        codes = torch.randint(0, 256, (num_out, num_in // 2), generator=generator)
        return codes.to(torch.uint8), scale
    weight = (torch.randn(num_out, num_in, generator=generator) * 3).to(torch.float8_e4m3fn)
    return weight, scale


def _sample_linear(seed: int) -> tuple[Tensor, Tensor, Tensor | None, bool, torch.dtype]:
    generator = torch.Generator().manual_seed(seed)
    dtype = (torch.float32, torch.bfloat16)[seed % 2]
    weight, scale = sample_weight(seed, 96, 64, ("plain", "fp8", "fp4")[seed % 3])
    return torch.randn(13, 64, generator=generator).to(dtype), weight, scale, seed % 4 < 2, dtype


@op(
    shape=lambda x, weight, scale, act_quant, out_dtype: x.new_empty(
        (x.shape[0], weight.shape[0]), dtype=out_dtype
    ),
    samples=_sample_linear,
    tolerance=Tolerance(2e-2, 1e-2),
)
def linear(
    x_TK: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    act_quant: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiply by a weight of the checkpoint, no bias.

    Args:
        x_TK: activations, [num_tokens, K], bfloat16 or float32.
        weight: float8_e4m3fn [N, K], packed FP4 uint8 [N, K/2], or plain [N, K].
        scale: E8M0 bytes of the weight, uint8; None for a plain weight.
        act_quant: quantise each activation row per 32 channels to FP8 first (quantised weights
            only).
        out_dtype: dtype of the result.
    Returns:
        [num_tokens, N], `out_dtype`.
    Numerics: exact operands, float32 accumulation, one rounding.
    Source: model.md 8.2, 8.3.
    """
    return linear_float32(x_TK, weight, scale, act_quant).to(out_dtype)


def _sample_grouped(seed: int) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    weight, scale = sample_weight(seed, 2 * 32, 64, ("plain", "fp8")[seed % 2])
    return torch.randn(11, 2, 64, generator=generator), weight, scale


@op(
    shape=lambda x, weight, scale: x.new_empty((x.shape[0], weight.shape[0])),
    samples=_sample_grouped,
    tolerance=Tolerance(2e-2, 1e-2),
)
def grouped_linear(x_TGK: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    """Multiply each group of channels by its own block of output rows (wo_a).

    Args:
        x_TGK: [num_tokens, groups, K], bfloat16 or float32.
        weight: [groups * N, K], float8_e4m3fn or plain; rows of a group are contiguous.
        scale: E8M0 bytes of the weight, or None.
    Returns:
        [num_tokens, groups * N], dtype of x. Activations are never quantised here.
    Source: model.md 3.10, contract A.
    """
    groups = x_TGK.shape[1]
    blocks = dequantize_weight(weight, scale).unflatten(0, (groups, -1))
    parts = [matmul_rows(x_TGK[:, g].float(), blocks[g]) for g in range(groups)]
    return torch.cat(parts, -1).to(x_TGK.dtype)
