"""Number formats of the checkpoint and of the caches: FP8 e4m3, FP4 e2m1, E8M0 and e4m3 scales.

The fake quantisers are part of the model (it was trained with them). Everything here is bit exact:
scales are
powers of two or e4m3 values, products of code and scale are exact in bfloat16.

Source: model.md 3.11 (quantisers), 8.2 and 8.3 (weights), 9.1 (records).
Letters: T tokens, D channels, N out, K in, R record bytes.
"""

import functools

import torch
from torch import Tensor

from graphs.op import EXACT, op

GROUP = 32  # channels per E8M0 scale, everywhere but in the compressed cache
FP4_GROUP = 16  # channels per e4m3 scale of the compressed cache
FP8_MAX = 448.0
FP4_MAX = 6.0
FP8_FLOOR = 1e-4  # smallest amax of an FP8 group
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

FORMATS = ("fp8_32", "fp4_32", "fp4_16")


@functools.cache
def _e8m0_table(device: torch.device) -> Tensor:
    values = torch.exp2(torch.arange(256, dtype=torch.float64) - 127).float()
    values[255] = torch.nan
    return values.to(device)


@functools.cache
def _e2m1_table(device: torch.device) -> Tensor:
    return torch.tensor(_E2M1 + tuple(-v for v in _E2M1), device=device)


def decode_e8m0(scale: Tensor) -> Tensor:
    """Decode E8M0 bytes (uint8) to float32: 2^(byte - 127), NaN for 255."""
    return _e8m0_table(scale.device)[scale.int()]


def decode_e2m1(packed: Tensor) -> Tensor:
    """Decode packed FP4 (uint8 [..., K/2], low nibble first) to float32 [..., K]."""
    nibbles = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    return _e2m1_table(packed.device)[nibbles.int()]


def encode_e2m1(x: Tensor) -> Tensor:
    """Round float32 in [-6, 6] to FP4 codes (uint8, not packed), ties to the even code."""
    a = x.abs()
    code = (a > 0.25).to(torch.uint8)
    for threshold, tie_goes_up in (
        (0.75, True),
        (1.25, False),
        (1.75, True),
        (2.5, False),
        (3.5, True),
        (5.0, False),
    ):
        code += (a >= threshold) if tie_goes_up else (a > threshold)
    return code + (torch.signbit(x).to(torch.uint8) << 3)


def power_of_two_exponent(amax: Tensor, inverse_max: float) -> Tensor:
    """Return the E8M0 byte (uint8) of the smallest power of two at or above amax * inverse_max."""
    scaled = amax * inverse_max  # torch rounds the number to float32 first
    bits = scaled.view(torch.int32)
    return ((bits + 0x7FFFFF) >> 23).to(
        torch.uint8
    )  # exponent field, plus one unless the mantissa is zero


def quantize_groups(x: Tensor, fmt: str) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise the last dim group by group.

    Args:
        x: [..., D], any float dtype; D divisible by the group.
        fmt: "fp8_32", "fp4_32" or "fp4_16".
    Returns:
        codes: float8_e4m3fn, or uint8 FP4 codes (not packed), [..., D / group, group].
        scale bytes: uint8 [..., D / group], E8M0 or e4m3 bits.
        scale: float32 [..., D / group, 1].
    """
    group = FP4_GROUP if fmt == "fp4_16" else GROUP
    grouped = x.float().unflatten(-1, (-1, group))
    amax = grouped.abs().amax(-1)
    if fmt == "fp4_16":
        e4m3 = (amax.clamp(min=FP4_MAX * 2.0**-9) / FP4_MAX).clamp(max=FP8_MAX)
        e4m3 = e4m3.to(torch.float8_e4m3fn)
        scale_bytes, scale = e4m3.view(torch.uint8), e4m3.float()
    else:
        largest, floor = (FP8_MAX, FP8_FLOOR) if fmt == "fp8_32" else (FP4_MAX, FP4_MAX * 2.0**-126)
        scale_bytes = power_of_two_exponent(amax.clamp(min=floor), 1.0 / largest)
        scale = decode_e8m0(scale_bytes)
    scale = scale.unsqueeze(-1)
    if fmt == "fp8_32":
        codes = (grouped / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    else:
        codes = encode_e2m1((grouped / scale).clamp(-FP4_MAX, FP4_MAX))
    return codes, scale_bytes, scale


def quantize_dequantize(x: Tensor, fmt: str) -> Tensor:
    """Fake-quantise the last dim (formats of `quantize_groups`); float32 result, exact in
    bfloat16."""
    codes, _, scale = quantize_groups(x, fmt)
    values = codes.float() if fmt == "fp8_32" else _e2m1_table(x.device)[codes.int()]
    return (values * scale).flatten(-2)


def dequantize_weight(weight: Tensor, scale: Tensor | None) -> Tensor:
    """Return a weight as float32 [..., N, K].

    Args:
        weight: float8_e4m3fn [..., N, K] with 32 x 32 blocks, uint8 [..., N, K/2] packed FP4 with
            groups of 32
            along K, or a plain float tensor (no scale).
        scale: E8M0 bytes, uint8 [..., ceil(N/32), ceil(K/32)] for FP8, [..., N, K/32] for FP4.
    """
    if scale is None:
        return weight.float()
    factor = decode_e8m0(scale)
    if weight.dtype == torch.uint8:
        values = decode_e2m1(weight)
        return (values.unflatten(-1, (-1, GROUP)) * factor.unsqueeze(-1)).flatten(-2)
    num_out, num_in = weight.shape[-2:]
    if num_out % GROUP == 0 and num_in % GROUP == 0:
        blocks = weight.float().unflatten(-1, (-1, GROUP)).unflatten(-3, (-1, GROUP))
        return (blocks * factor[..., None, :, None]).flatten(-2).flatten(-3, -2)
    by_row = factor.repeat_interleave(GROUP, -2)[..., :num_out, :]
    return weight.float() * by_row.repeat_interleave(GROUP, -1)[..., :num_in]


def record_bytes(dim: int, fmt: str) -> int:
    """Return the bytes of one cache record of `dim` channels."""
    if fmt == "fp8_32":
        return dim + dim // GROUP
    return dim // 2 + dim // (FP4_GROUP if fmt == "fp4_16" else GROUP)


def unpack_records(records: Tensor, fmt: str) -> Tensor:
    """Decode cache entries to float32 [..., D]; entries that are not uint8 are plain values."""
    if records.dtype != torch.uint8:
        return records.float()
    if fmt == "fp8_32":
        dim = records.shape[-1] * GROUP // (GROUP + 1)
        values = records[..., :dim].view(torch.float8_e4m3fn).float()
        scale = decode_e8m0(records[..., dim:])
        return (values.unflatten(-1, (-1, GROUP)) * scale.unsqueeze(-1)).flatten(-2)
    group = FP4_GROUP if fmt == "fp4_16" else GROUP
    data = (
        records.shape[-1] * group // (group + 2)
    )  # group / 2 code bytes and one scale byte a group
    values = decode_e2m1(records[..., :data])
    tail = records[..., data:].contiguous()
    scale = tail.view(torch.float8_e4m3fn).float() if fmt == "fp4_16" else decode_e8m0(tail)
    return (values.unflatten(-1, (-1, group)) * scale.unsqueeze(-1)).flatten(-2)


def _sample(seed: int) -> tuple[Tensor, str]:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-9, 6, (11, 4, 1), generator=generator).float())
    x = (torch.randn(11, 4, GROUP, generator=generator) * spread).flatten(1)
    return x, FORMATS[seed % len(FORMATS)]


@op(shape=lambda x, fmt: torch.empty_like(x), samples=_sample, tolerance=EXACT)
def fake_quantize(x: Tensor, fmt: str) -> Tensor:
    """Round the last dim to the grid of a cache format and back.

    Args:
        x: [..., D], bfloat16 or float32.
        fmt: "fp8_32", "fp4_32" or "fp4_16".
    Returns:
        Same shape and dtype; the values are exact in both dtypes.
    Source: model.md 3.11.
    """
    return quantize_dequantize(x, fmt).to(x.dtype)


@op(
    shape=lambda x, fmt: x.new_empty(
        (*x.shape[:-1], record_bytes(x.shape[-1], fmt)), dtype=torch.uint8
    ),
    samples=_sample,
    tolerance=EXACT,
)
def pack_records(x: Tensor, fmt: str) -> Tensor:
    """Quantise rows into cache records: all codes of a row, then its scales.

    Args:
        x: [..., D], bfloat16 or float32.
        fmt: "fp8_32" (window, D + D/32 bytes), "fp4_16" (compressed, D/2 + D/16), "fp4_32" (index
            key, D/2 + D/32).
    Returns:
        uint8 [..., record bytes]; decoding gives exactly `fake_quantize(x, fmt)`.
    Source: model.md 9.1.
    """
    codes, scale_bytes, _ = quantize_groups(x, fmt)
    data = codes.flatten(-2)
    if fmt == "fp8_32":
        data = data.view(torch.uint8)
    else:
        data = data[..., 0::2] | (data[..., 1::2] << 4)
    return torch.cat((data, scale_bytes), -1)
