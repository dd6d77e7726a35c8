"""Number formats, bit for bit: check vectors of real weights, fake quantisers, cache records."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs.ops import fake_quantize, pack_records
from graphs.ops.quant import (
    FORMATS,
    decode_e2m1,
    decode_e8m0,
    dequantize_weight,
    encode_e2m1,
    record_bytes,
    unpack_records,
)
from tests.helpers.scalar_formats import (
    E2M1,
    FORMAT_GROUP,
    bf16,
    e2m1_value,
    e4m3_code,
    e4m3_value,
    e8m0_value,
    f32,
    f32_bits,
    f32_from_bits,
    record_of,
    scale_byte,
)

LARGEST = {"fp8_32": 448.0, "fp4_32": 6.0, "fp4_16": 6.0}
FLOOR = {"fp8_32": f32(1e-4), "fp4_32": 6 * 2.0**-126, "fp4_16": 6 * 2.0**-9}
PRODUCTION = {"fp8_32": (512, 528), "fp4_16": (512, 288), "fp4_32": (128, 68)}
# Where E2M1 rounding changes its mind, and the magnitude an exact tie goes to.
E2M1_TIES = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def check_rows(rows, fmt):
    """Compare fake quantiser, packer and unpacker with the scalar implementation."""
    x = torch.tensor(rows, dtype=torch.float32)
    made = [record_of(row, fmt) for row in x.tolist()]
    values = torch.tensor([v for _, v in made], dtype=torch.float32)
    records = torch.tensor([list(r) for r, _ in made], dtype=torch.uint8)
    assert same_bits(fake_quantize(x, fmt), values)
    assert torch.equal(pack_records(x, fmt), records)
    assert same_bits(unpack_records(records, fmt), values)
    assert same_bits(values.bfloat16().float(), values), "not exact in bfloat16"


def neighbours(value):
    """The value and the float32 values on both sides of it."""
    bits = f32_bits(value)
    return [f32_from_bits(bits - 1), value, f32_from_bits(bits + 1)]


# ---- check vectors -------------------------------------------------------------------------------


def test_fp8_bytes_of_the_real_checkpoint():
    weight = torch.tensor([[0xD8, 0x71, 0xF2, 0x79, 0x70, 0x69, 0xF0, 0xE5]], dtype=torch.uint8)
    scale = torch.tensor([[0x73]], dtype=torch.uint8)
    value = dequantize_weight(weight.view(torch.float8_e4m3fn), scale)
    expected = [-0.00390625, 0.03515625, -0.0390625, 0.0703125, 0.03125, 0.017578125, -0.03125]
    assert value.tolist() == [[*expected, -0.0126953125]]


def test_fp4_bytes_of_the_real_checkpoint():
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, :8] = torch.tensor([0xA0, 0xA8, 0xEC, 0x4A, 0xAD, 0xAF, 0x42, 0xAA])
    value = dequantize_weight(packed, torch.tensor([[0x78]], dtype=torch.uint8))[0, :16]
    expected = [0, -0.0078125, -0.0, -0.0078125, -0.015625, -0.03125, -0.0078125, 0.015625]
    expected += [-0.0234375, -0.0078125, -0.046875, -0.0078125]
    expected += [0.0078125, 0.015625, -0.0078125, -0.0078125]
    assert same_bits(value, torch.tensor(expected))


def test_every_code_and_scale_byte():
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    fp8 = codes.view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(
        fp8, torch.tensor([e4m3_value(b) for b in range(256)]), rtol=0, atol=0, equal_nan=True
    )
    scales = torch.tensor([e8m0_value(b) for b in range(256)], dtype=torch.float64)
    torch.testing.assert_close(decode_e8m0(codes).double(), scales, rtol=0, atol=0, equal_nan=True)
    nibbles = torch.tensor([[e2m1_value(b & 15), e2m1_value(b >> 4)] for b in range(256)])
    assert same_bits(decode_e2m1(codes.unsqueeze(-1)), nibbles)


@pytest.mark.parametrize(("num_out", "num_in"), [(64, 96), (40, 72), (1, 1), (33, 64)])
def test_fp8_scales_belong_to_blocks_of_32_rows_and_columns(num_out, num_in):
    raw = torch.randint(0, 127, (num_out, num_in)).to(torch.uint8)
    scale = torch.randint(100, 140, (-(-num_out // 32), -(-num_in // 32))).to(torch.uint8)
    value = dequantize_weight(raw.view(torch.float8_e4m3fn), scale)
    for n in range(num_out):
        for k in range(num_in):
            expected = e4m3_value(int(raw[n, k])) * e8m0_value(int(scale[n // 32, k // 32]))
            assert value[n, k].item() == expected


def test_fp4_scales_belong_to_32_columns_of_one_row_of_one_expert():
    raw = torch.randint(0, 256, (2, 5, 32)).to(torch.uint8)
    scale = torch.randint(100, 140, (2, 5, 2)).to(torch.uint8)
    value = dequantize_weight(raw, scale)
    assert value.shape == (2, 5, 64)
    for e in range(2):
        for n in range(5):
            for k in range(64):
                code = int(raw[e, n, k // 2]) >> (4 * (k % 2)) & 15
                expected = e2m1_value(code) * e8m0_value(int(scale[e, n, k // 32]))
                assert value[e, n, k].item() == expected


def test_plain_weight_is_upcast():
    weight = torch.randn(3, 5).bfloat16()
    assert same_bits(dequantize_weight(weight, None), weight.float())


# ---- rounding to codes ---------------------------------------------------------------------------


def test_e2m1_rounds_every_threshold_as_specified():
    for threshold, tie in E2M1_TIES.items():
        below, _, above = neighbours(threshold)
        lower = max(v for v in E2M1 if v < threshold)
        upper = min(v for v in E2M1 if v > threshold)
        for sign in (1.0, -1.0):
            codes = encode_e2m1(torch.tensor([below, threshold, above]) * sign)
            got = [e2m1_value(c) for c in codes.tolist()]
            assert got == [sign * lower, sign * tie, sign * upper], threshold
    zeros = encode_e2m1(torch.tensor([0.0, -0.0, 1e-30, -1e-30]))
    assert zeros.tolist() == [0, 8, 0, 8]


def test_e4m3_cast_rounds_to_nearest_even_and_keeps_subnormals():
    finite = [e4m3_value(b) for b in range(127)]
    points = []
    for low, high in zip(finite, finite[1:], strict=False):
        points += [low, *neighbours((low + high) / 2), *neighbours(high)]
    points += [-p for p in points]
    x = torch.tensor(points).clamp(-448, 448)
    got = x.to(torch.float8_e4m3fn).view(torch.uint8)
    assert got.tolist() == [e4m3_code(v) for v in x.tolist()]


@pytest.mark.parametrize("fmt", FORMATS)
def test_scale_steps_exactly_at_the_largest_code(fmt):
    """A group whose amax is the largest code times the scale keeps that scale, a larger one does
    not."""
    exponents = range(-6, 8) if fmt == "fp4_16" else range(-12, 60)
    for exponent in exponents:
        for amax in neighbours(LARGEST[fmt] * 2.0**exponent):
            row = [amax] + [amax / 3, -amax / 5, 0.0] * 5
            row = (row * 2)[: FORMAT_GROUP[fmt]]
            check_rows([[f32(v) for v in row]], fmt)
    if fmt != "fp4_16":
        assert scale_byte(LARGEST[fmt] * 8, fmt) == 130
        assert scale_byte(LARGEST[fmt] * 8.001, fmt) == 131


@pytest.mark.parametrize("fmt", FORMATS)
def test_small_groups_use_the_floor(fmt):
    size = FORMAT_GROUP[fmt]
    floor = FLOOR[fmt]
    rows = [[0.0] * size, [-0.0] * size, [1e-42] * size]
    rows += [[f32(a * (1 if i % 2 else -0.4)) for i in range(size)] for a in neighbours(floor)]
    rows += [[f32(floor / 2**k)] * size for k in range(1, 12)]
    check_rows(rows, fmt)
    lowest = {"fp8_32": 127 - 22, "fp4_32": 1, "fp4_16": 1}[fmt]
    assert pack_records(torch.zeros(1, size), fmt)[0, -1].item() == lowest


def test_fp4_16_scale_is_rounded_and_saturates():
    rows = []
    for byte in range(1, 126):  # amax / 6 on, and next to, every boundary between two e4m3 scales
        middle = (e4m3_value(byte) + e4m3_value(byte + 1)) / 2 * 6
        rows += [[a, -a, a / 2, a / 4] * 4 for a in neighbours(f32(middle))]
    rows += [[a, a / 7, -a, 1.0] * 4 for a in (2687.9, 2688.0, 2700.0, 1e6, 3e38)]
    check_rows([[f32(v) for v in row] for row in rows], "fp4_16")
    # A scale rounded down makes the largest value saturate at 6.
    assert fake_quantize(torch.full((1, 16), 1e6), "fp4_16").unique().tolist() == [6 * 448.0]


# ---- whole groups --------------------------------------------------------------------------------

_BITS = st.integers(0, 0x7F7FFFFF)  # every finite magnitude


@st.composite
def adversarial_group(draw, fmt):
    """A group with a chosen amax, whose other values sit on, or next to, rounding boundaries."""
    size = FORMAT_GROUP[fmt]
    amax = abs(f32_from_bits(draw(_BITS)))
    if draw(st.booleans()):
        amax = f32(LARGEST[fmt] * 2.0 ** draw(st.integers(-30, 30)) * draw(st.floats(0.4, 1.1)))
    amax = min(max(amax, 1e-44), 3.0e38)
    byte = scale_byte(amax, fmt)
    scale = e4m3_value(byte) if fmt == "fp4_16" else e8m0_value(byte)
    grid = [e4m3_value(b) for b in range(127)] if fmt == "fp8_32" else list(E2M1)
    middles = [(a + b) / 2 for a, b in zip(grid, grid[1:], strict=False)]
    row = [amax]
    for _ in range(size - 1):
        point = draw(st.sampled_from(middles + grid)) * scale
        bits = f32_bits(min(point, amax)) + draw(st.integers(-1, 1))
        value = f32_from_bits(min(max(bits, 0), f32_bits(amax)))
        row.append(-value if draw(st.booleans()) else value)
    return row


@pytest.mark.parametrize("fmt", FORMATS)
def test_adversarial_groups(fmt):
    @settings(max_examples=150)
    @given(adversarial_group(fmt), adversarial_group(fmt))
    def check(first, second):
        check_rows([first + second], fmt)

    check()


@pytest.mark.parametrize("fmt", FORMATS)
def test_random_rows_of_many_magnitudes(fmt):
    exponents = torch.randint(-30, 14, (80, 8, 1)).float()
    x = (torch.randn(80, 8, 32) * torch.exp2(exponents)).flatten(1)
    check_rows(x.tolist(), fmt)
    x[torch.rand(x.shape) < 0.4] = 0.0
    check_rows(x.tolist(), fmt)


@pytest.mark.parametrize("fmt", FORMATS)
def test_bfloat16_input_is_quantised_as_its_value(fmt):
    x = (torch.randn(40, 4, 32) * torch.exp2(torch.randint(-9, 9, (40, 4, 1)).float())).flatten(1)
    half = x.bfloat16()
    assert half.tolist() == [[bf16(v) for v in row] for row in x.tolist()]
    quantised = fake_quantize(half, fmt)
    assert quantised.dtype == torch.bfloat16
    assert same_bits(quantised.float(), fake_quantize(half.float(), fmt))
    assert torch.equal(pack_records(half, fmt), pack_records(half.float(), fmt))


# ---- records -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS)
def test_record_layout_at_production_size(fmt):
    dim, size = PRODUCTION[fmt]
    assert record_bytes(dim, fmt) == size
    spread = torch.exp2(torch.randint(-6, 7, (9, dim // 16, 1)).float())
    x = (torch.randn(9, dim // 16, 16) * spread).flatten(1)
    records = pack_records(x, fmt)
    assert records.shape == (9, size)
    check_rows(x.tolist(), fmt)
    group = FORMAT_GROUP[fmt]
    num_scales = dim // group
    for row, record in zip(x.tolist(), records.tolist(), strict=True):
        for g in range(num_scales):  # scales lie behind all codes, in order of their groups
            amax = max(abs(v) for v in row[g * group : (g + 1) * group])
            assert record[size - num_scales + g] == scale_byte(amax, fmt)


@pytest.mark.parametrize("fmt", FORMATS)
def test_unpacking_every_leading_shape(fmt):
    x = torch.randn(2, 3, 5, 64)
    records = pack_records(x, fmt)
    assert records.shape == (2, 3, 5, record_bytes(64, fmt))
    assert same_bits(unpack_records(records, fmt), fake_quantize(x, fmt))
    strided = records.transpose(0, 2)
    assert same_bits(unpack_records(strided, fmt), fake_quantize(x.transpose(0, 2), fmt))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_entries_unpack_to_themselves(dtype):
    x = torch.randn(4, 64).to(dtype)
    for fmt in FORMATS:
        assert same_bits(unpack_records(x, fmt), x.float())


def test_scalar_formats_agree_with_their_own_tables():
    """The second implementation is checked too: codes decode to the nearest value."""
    for fmt_values, code in ((E2M1, None), ([e4m3_value(b) for b in range(127)], e4m3_code)):
        for value in fmt_values:
            if code is not None:
                assert e4m3_value(code(value)) == value
    assert math.isnan(e4m3_value(0x7F))
    assert f32(1e-4) == pytest.approx(1e-4)
    assert bf16(1.00390625) == 1.0
    assert bf16(f32_from_bits(0x3F818000)) == f32_from_bits(0x3F820000)
