"""Number formats one value at a time: a second implementation, apart from `graphs.ops.quant`.

Written from the text of model.md (3.11, 8.2, 8.3, 9.1) with `struct`, `math` and exact fractions.
Slow.
"""

import bisect
import math
import struct
from fractions import Fraction

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FORMAT_GROUP = {"fp8_32": 32, "fp4_32": 32, "fp4_16": 16}


def f32(value: float) -> float:
    """Round a double to float32, ties to even."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


def f32_bits(value: float) -> int:
    """Return the bits of a float32 value."""
    return struct.unpack("<I", struct.pack("<f", value))[0]


def f32_from_bits(bits: int) -> float:
    """Return the float32 value of 32 bits."""
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def bf16(value: float) -> float:
    """Round a float32 value to bfloat16, ties to even."""
    bits = f32_bits(value)
    low = bits & 0xFFFF
    bits -= low
    if low > 0x8000 or (low == 0x8000 and bits & 0x10000):
        bits += 0x10000
    return f32_from_bits(bits)


def e4m3_value(byte: int) -> float:
    """Decode one E4M3 (fn) byte: bias 7, subnormals, no infinity, NaN at 0x7F and 0xFF."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        magnitude = mantissa * 2.0**-9
    else:
        magnitude = (8 + mantissa) * 2.0 ** (exponent - 10)
    return -magnitude if byte & 0x80 else magnitude


_E4M3 = [e4m3_value(code) for code in range(127)]  # ascending


def _nearest_code(magnitude: float, values: tuple[float, ...] | list[float]) -> int:
    """Return the index of the nearest value; of two equally near the even one."""
    above = bisect.bisect_left(values, magnitude)
    if above == len(values) or values[above] == magnitude:
        return min(above, len(values) - 1)
    below_distance = Fraction(magnitude) - Fraction(values[above - 1])
    above_distance = Fraction(values[above]) - Fraction(magnitude)
    if below_distance == above_distance:
        return above if above % 2 == 0 else above - 1
    return above if above_distance < below_distance else above - 1


def _is_negative(value: float) -> bool:
    return math.copysign(1.0, value) < 0


def e4m3_code(value: float) -> int:
    """Round to an E4M3 byte, saturating."""
    return _nearest_code(abs(value), _E4M3) | (0x80 if _is_negative(value) else 0)


def e2m1_code(value: float) -> int:
    """Round to an E2M1 code 0..15, saturating."""
    return _nearest_code(abs(value), E2M1) | (8 if _is_negative(value) else 0)


def e2m1_value(code: int) -> float:
    """Decode an E2M1 code 0..15."""
    return -E2M1[code & 7] if code & 8 else E2M1[code]


def e8m0_value(byte: int) -> float:
    """Decode one E8M0 byte."""
    return math.nan if byte == 255 else 2.0 ** (byte - 127)


def scale_byte(amax: float, fmt: str) -> int:
    """Return the scale byte of a group whose largest magnitude is `amax` (a float32 value)."""
    if fmt == "fp4_16":
        floored = max(amax, 6 * 2.0**-9)
        return e4m3_code(f32(floored / 6))
    largest, floor = (448, f32(1e-4)) if fmt == "fp8_32" else (6, 6 * 2.0**-126)
    ratio = f32(max(amax, floor) * f32(1 / largest))
    mantissa, exponent = math.frexp(ratio)  # ratio = mantissa * 2^exponent, 0.5 <= mantissa < 1
    return (exponent - 1 if mantissa == 0.5 else exponent) + 127


def quantize_group(values: list[float], fmt: str) -> tuple[list[int], int, list[float]]:
    """Quantise one group of float32 values.

    Returns:
        codes (E4M3 bytes or E2M1 codes), the scale byte, the fake-quantised values.
    """
    byte = scale_byte(max(abs(v) for v in values), fmt)
    scale = e4m3_value(byte) if fmt == "fp4_16" else e8m0_value(byte)
    quotients = [f32(v / scale) for v in values]
    if fmt == "fp8_32":
        codes = [e4m3_code(q) for q in quotients]
        return codes, byte, [e4m3_value(c) * scale for c in codes]
    codes = [e2m1_code(q) for q in quotients]
    return codes, byte, [e2m1_value(c) * scale for c in codes]


def record_of(row: list[float], fmt: str) -> tuple[bytes, list[float]]:
    """Return the cache record of a row (codes, then scales) and its fake-quantised values."""
    size = FORMAT_GROUP[fmt]
    codes: list[int] = []
    scales: list[int] = []
    values: list[float] = []
    for begin in range(0, len(row), size):
        group_codes, byte, group_values = quantize_group(row[begin : begin + size], fmt)
        codes += group_codes
        scales.append(byte)
        values += group_values
    if fmt != "fp8_32":  # two codes a byte, the even channel in the low nibble
        codes = [codes[i] | codes[i + 1] << 4 for i in range(0, len(codes), 2)]
    return bytes(codes + scales), values
