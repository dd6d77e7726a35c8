"""Norm, rotary embedding, hyper-connections, linears and experts against their definitions.

The definitions are loops over float64 written from model.md; test_ops_engram.py, test_ops_state.py,
test_ops_attention.py and test_ops_sampling.py do the same for the other ops.
"""

import itertools
import math

import pytest
import torch

from graphs.ops import (
    apply_rope,
    combine_experts,
    dispatch_experts,
    grouped_linear,
    hc_mixes,
    hc_post,
    hc_pre,
    linear,
    rms_norm,
    rope_table,
    route_experts,
    routed_experts,
    swiglu,
)
from graphs.ops.hyper_connection import sinkhorn
from model.config import RopeScaling
from model.rope import inverse_frequencies
from tests.helpers.compare import assert_rounded
from tests.helpers.scalar_formats import (
    bf16,
    e2m1_value,
    e4m3_value,
    e8m0_value,
    f32,
    quantize_group,
)

DTYPES = (torch.float32, torch.bfloat16)


def round_to(value, dtype):
    return bf16(value) if dtype == torch.bfloat16 else f32(value)


# ---- norm ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype):
    x = (torch.randn(7, 96) * torch.tensor([1e-6, 0.1, 1, 3, 50, 1e4, 1e-10])[:, None]).to(dtype)
    weight = (torch.randn(96) * 0.03).to(dtype)
    expected = torch.zeros(7, 96, dtype=torch.float64)
    for t, row in enumerate(x.tolist()):
        factor = (math.fsum(v * v for v in row) / 96 + 1e-20) ** -0.5
        expected[t] = torch.tensor(
            [w * (v * factor) for v, w in zip(row, weight.tolist(), strict=True)]
        )
    assert_rounded(rms_norm(x, weight, 1e-20), expected, expected.abs() * 3e-7)


def test_rms_norm_eps_is_1e_20_in_float32():
    one = torch.ones(64)
    for size, expected in ((1e-10, 0.5**0.5), (1e-12, 1e-12 / (1e-24 + 1e-20) ** 0.5), (1e-7, 1.0)):
        y = rms_norm(torch.full((1, 64), size), one, 1e-20)
        torch.testing.assert_close(y, torch.full((1, 64), expected), rtol=1e-5, atol=0)
    assert rms_norm(torch.zeros(1, 64), one, 1e-20).eq(0).all()


# ---- rotary embedding ----------------------------------------------------------------------------

YARN = RopeScaling(
    rope_type="yarn", factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=65536
)
INV_CHECK = {
    0: 1.0,
    1: 0.68765604,
    15: 0.0036355385,
    16: 0.0022656249,
    20: 2.9697778e-4,
    24: 1.9531253e-5,
    25: 5.3723124e-6,
    31: 5.6805294e-7,
}


def test_yarn_check_values():
    frequencies = inverse_frequencies(160000, 64, YARN)
    for index, expected in INV_CHECK.items():
        assert frequencies[index].item() == pytest.approx(expected, rel=3e-7)
    plain = inverse_frequencies(10000, 64, None)
    for index in range(32):
        assert plain[index].item() == pytest.approx(10000 ** (-index / 32), rel=3e-7)


def test_yarn_upper_end_of_the_ramp_is_capped():
    """With few channels d(beta_slow) passes the last channel: the ramp ends there."""
    scaling = RopeScaling(
        rope_type="yarn",
        factor=4,
        beta_fast=8,
        beta_slow=1e-9,
        original_max_position_embeddings=65536,
    )
    channels, theta = 8, 10000.0
    low = math.floor(channels * math.log(65536 / (2 * math.pi * 8)) / (2 * math.log(theta)))
    got = inverse_frequencies(theta, channels, scaling)
    for i in range(channels // 2):
        ramp = min(max((i - low) / (channels - 1 - low), 0), 1)
        f = theta ** (-2 * i / channels)
        assert got[i].item() == pytest.approx(f / 4 * ramp + f * (1 - ramp), rel=1e-6)


def test_rope_table_uses_float32_angles():
    frequencies = inverse_frequencies(160000, 64, YARN)
    positions = torch.tensor([0, 1, 2, 127, 4097, 16385, 20479, 99999, 524287, 1048575])
    for group in (1, 2):
        table = rope_table(positions.int(), frequencies, group)
        assert table.shape == (10, 2, 32)
        double_angle = torch.zeros(10, 2, 32, dtype=torch.float64)
        expected = torch.zeros(10, 2, 32, dtype=torch.float64)
        for t, i in itertools.product(range(10), range(32)):
            first = positions[t].item() // group * group
            angle = first * frequencies[i].item()  # exact in float64
            rounded = f32(angle)
            double_angle[t, :, i] = torch.tensor([math.cos(angle), math.sin(angle)])
            expected[t, :, i] = torch.tensor([math.cos(rounded), math.sin(rounded)])
        assert_rounded(table, expected, 1e-15)
        assert (double_angle - expected).abs().max() > 1e-3, "the two angles must differ to tell"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 48), (5, 3, 48), (5, 16)])
def test_apply_rope(shape, dtype):
    x = torch.randn(shape).to(dtype)
    angles = torch.rand(5, 8) * 6
    table = torch.stack((angles.cos(), angles.sin()), 1)
    for inverse in (False, True):
        expected = x.double().clone()
        first = shape[-1] - 16
        for t, i in itertools.product(range(5), range(8)):
            c, s = table[t, 0, i].double(), table[t, 1, i].double() * (-1 if inverse else 1)
            a = x[t, ..., first + 2 * i].double()
            b = x[t, ..., first + 2 * i + 1].double()
            expected[t, ..., first + 2 * i] = a * c - b * s
            expected[t, ..., first + 2 * i + 1] = a * s + b * c
        assert_rounded(apply_rope(x, table, inverse), expected, 1e-6)
    back = apply_rope(apply_rope(x, table, False), table, True)
    assert (back.double() - x.double()).abs().max() < (2e-6 if dtype == torch.float32 else 0.05)


# ---- hyper-connections ---------------------------------------------------------------------------


def brute_sinkhorn(logits, iters, eps):
    """logits[j][k] -> comb[j][k] in float64, as model.md 2.3 writes it."""
    size = len(logits)
    comb = []
    for row in logits:
        powers = [math.exp(v - max(row)) for v in row]
        comb.append([p / math.fsum(powers) + eps for p in powers])

    def normalise_columns():
        for k in range(size):
            total = math.fsum(comb[j][k] for j in range(size)) + eps
            for j in range(size):
                comb[j][k] /= total

    def normalise_rows():
        for row in comb:
            total = math.fsum(row) + eps
            row[:] = [v / total for v in row]

    normalise_columns()
    for _ in range(iters - 1):
        normalise_rows()
        normalise_columns()
    return comb


SINKHORN_LOGITS = [[2, -1, 0, 1], [0, 1, -2, 0.5], [-1, 0, 3, -0.5], [1, 0.5, -0.25, 0.25]]
SINKHORN_COMB = [
    [0.5430942, 0.0460091, 0.0625672, 0.3483351],
    [0.1160783, 0.536888, 0.0133731, 0.3336667],
    [0.0181903, 0.0841312, 0.8453717, 0.0522868],
    [0.3226362, 0.3329707, 0.0786871, 0.2657105],
]


def test_sinkhorn_check_vector():
    comb = sinkhorn(torch.tensor([SINKHORN_LOGITS]), 20, 1e-6)[0]
    torch.testing.assert_close(comb, torch.tensor(SINKHORN_COMB), rtol=0, atol=1.5e-7)


@pytest.mark.parametrize(("size", "iters"), [(4, 20), (4, 1), (4, 2), (2, 20), (3, 5)])
def test_sinkhorn_rounds(size, iters):
    logits = torch.randn(6, size, size) * 3
    got = sinkhorn(logits, iters, 1e-6)
    for t in range(6):
        expected = torch.tensor(brute_sinkhorn(logits[t].tolist(), iters, 1e-6))
        assert_rounded(got[t], expected.double(), 1e-6)
    # Extreme logits: entries of a dead row are carried by the eps alone.
    dead = torch.full((1, size, size), -80.0)
    dead[0, :, 0] = 0.0
    expected = torch.tensor(brute_sinkhorn(dead[0].tolist(), iters, 1e-6), dtype=torch.float64)
    got = sinkhorn(dead, iters, 1e-6)[0].double()
    assert ((got - expected) / expected).abs().max() < 1e-4


def sigmoid(value):
    return 1 / (1 + math.exp(-value)) if value > -700 else 0.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_streams", [4, 2])
def test_hc_mixes(dtype, num_streams):
    c, d, t = num_streams, 24, 5
    streams = (torch.randn(t, c, d) * torch.tensor([1, 30, 0.01, 1, 1e-10])[:, None, None]).to(
        dtype
    )
    fn = torch.randn(c * (c + 2), c * d) * 0.2
    scale, base = torch.rand(3) + 0.5, torch.randn(c * (c + 2))
    got = hc_mixes(streams, fn, scale, base, 20, 1e-6, 1e-20)
    pre, post = torch.zeros(t, c).double(), torch.zeros(t, c).double()
    comb = torch.zeros(t, c, c).double()
    s, b = scale.tolist(), base.tolist()
    for i in range(t):
        flat = [v for stream in streams[i].tolist() for v in stream]
        statistic = (math.fsum(v * v for v in flat) / len(flat) + 1e-20) ** -0.5
        m = [
            math.fsum(v * w for v, w in zip(flat, row, strict=True)) * statistic
            for row in fn.tolist()
        ]
        for k in range(c):
            pre[i, k] = sigmoid(m[k] * s[0] + b[k]) + 1e-6
            post[i, k] = 2 * sigmoid(m[c + k] * s[1] + b[c + k])
        logits = [
            [m[2 * c + c * j + k] * s[2] + b[2 * c + c * j + k] for k in range(c)] for j in range(c)
        ]
        comb[i] = torch.tensor(brute_sinkhorn(logits, 20, 1e-6))
    for actual, expected in zip(got, (pre, post, comb), strict=True):
        assert_rounded(actual, expected, 2e-6)


def test_hc_eps_is_added_to_pre_and_not_to_post():
    base = torch.full((24,), -60.0)
    base[8:] = 0.0
    zeros = torch.zeros(24, 64)
    pre, post, comb = hc_mixes(torch.randn(3, 4, 16), zeros, torch.ones(3), base, 20, 1e-6, 1e-20)
    torch.testing.assert_close(pre, torch.full((3, 4), 1e-6), rtol=1e-6, atol=0)
    assert post.max() < 1e-20
    torch.testing.assert_close(comb, torch.full((3, 4, 4), 0.25), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_hc_pre_and_post(dtype):
    t, c, d = 5, 4, 16
    streams, out = torch.randn(t, c, d).to(dtype), torch.randn(t, d).to(dtype)
    pre, post, comb = torch.rand(t, c), torch.rand(t, c) * 2, torch.rand(t, c, c)
    folded = torch.zeros(t, d).double()
    new = torch.zeros(t, c, d).double()
    for i, x in itertools.product(range(t), range(d)):
        folded[i, x] = math.fsum(pre[i, k].item() * streams[i, k, x].item() for k in range(c))
        for k in range(c):  # comb[source][target]
            terms = [comb[i, j, k].item() * streams[i, j, x].item() for j in range(c)]
            new[i, k, x] = math.fsum([post[i, k].item() * out[i, x].item(), *terms])
    assert_rounded(hc_pre(streams, pre), folded, 2e-6)
    assert_rounded(hc_post(out, streams, post, comb), new, 3e-6)


# ---- linear --------------------------------------------------------------------------------------


def stored_weight(kind, num_out, num_in, generator):
    """Return (weight, scale, values): storage tensors and the decoded rows as lists."""
    if kind == "plain" or kind == "bfloat16":
        weight = torch.randn(num_out, num_in, generator=generator)
        weight = weight if kind == "plain" else weight.bfloat16()
        return weight, None, weight.tolist()
    if kind == "fp8":
        raw = torch.randint(0, 256, (num_out, num_in), generator=generator).to(torch.uint8)
        raw[(raw & 0x7F) == 0x7F] = 0  # no NaN
        rows = -(-num_out // 32)
        scale = torch.randint(115, 122, (rows, num_in // 32), generator=generator).to(torch.uint8)
        values = [
            [
                e4m3_value(int(raw[n, k])) * e8m0_value(int(scale[n // 32, k // 32]))
                for k in range(num_in)
            ]
            for n in range(num_out)
        ]
        return raw.view(torch.float8_e4m3fn), scale, values
    raw = torch.randint(0, 256, (num_out, num_in // 2), generator=generator).to(torch.uint8)
    scale = torch.randint(118, 124, (num_out, num_in // 32), generator=generator).to(torch.uint8)
    values = [
        [
            e2m1_value(int(raw[n, k // 2]) >> 4 * (k % 2) & 15) * e8m0_value(int(scale[n, k // 32]))
            for k in range(num_in)
        ]
        for n in range(num_out)
    ]
    return raw, scale, values


def quantised_row(row):
    """Quantise one activation row per 32 channels to FP8 and back."""
    return [v for g in range(0, len(row), 32) for v in quantize_group(row[g : g + 32], "fp8_32")[2]]


def dot(a, b):
    """Return the float64 dot product and the error a float32 sum may have."""
    products = [x * y for x, y in zip(a, b, strict=True)]
    return math.fsum(products), math.fsum(abs(p) for p in products) * 1.5e-6


def product(rows, weight_rows):
    made = [[dot(row, w) for w in weight_rows] for row in rows]
    value = torch.tensor([[v for v, _ in row] for row in made], dtype=torch.float64)
    return value, torch.tensor([[e for _, e in row] for row in made], dtype=torch.float64)


@pytest.mark.parametrize("kind", ["plain", "bfloat16", "fp8", "fp4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear(kind, dtype):
    generator = torch.Generator().manual_seed(3)
    weight, scale, values = stored_weight(kind, 40, 96, generator)
    x = (torch.randn(5, 96, generator=generator) * 7).to(dtype)
    for act_quant in (False, True):
        rows = x.tolist()
        if act_quant and scale is not None:  # plain weights are never given quantised input
            rows = [quantised_row(row) for row in rows]
        expected, error = product(rows, values)
        for out_dtype in DTYPES:
            got = linear(x, weight, scale, act_quant, out_dtype)
            assert got.dtype == out_dtype
            assert_rounded(got, expected, error)
    if scale is not None:
        quantised, plain = (linear(x, weight, scale, q, torch.float32) for q in (True, False))
        assert (quantised - plain).abs().max() > 1e-2 * plain.abs().max()


@pytest.mark.parametrize("kind", ["plain", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_linear_rows_of_a_group_are_contiguous(kind, dtype):
    generator = torch.Generator().manual_seed(4)
    groups, num_in, per_group = 3, 64, 32
    weight, scale, values = stored_weight(kind, groups * per_group, num_in, generator)
    x = torch.randn(4, groups, num_in, generator=generator).to(dtype)
    got = grouped_linear(x, weight, scale)
    for g in range(groups):
        part = slice(g * per_group, (g + 1) * per_group)
        expected, error = product(x[:, g].tolist(), values[part])
        assert_rounded(got[:, part], expected, error)


# ---- experts -------------------------------------------------------------------------------------


def brute_route(logits, bias, topk, scale):
    """Return ids ascending and their weights for one row."""
    scores = [f32(math.sqrt(z if z > 20 else math.log1p(math.exp(z)))) for z in logits]
    order = sorted(range(len(logits)), key=lambda e: (-f32(scores[e] + bias[e]), e))
    ids = sorted(order[:topk])
    total = math.fsum(scores[e] for e in ids) + 1e-20
    return ids, [scores[e] / total * scale for e in ids]


def test_route_experts():
    logits = torch.randn(40, 12) * 6
    logits[30:] = torch.randint(-2, 3, (10, 12)).float()  # many ties
    logits[0, :3] = torch.tensor([1000.0, 20.5, 88.9])
    logits[1] = -torch.arange(12) * 40.0
    for bias in (torch.randn(12), torch.zeros(12)):
        ids, weights = route_experts(logits, bias, torch.ones(40, dtype=torch.int32), 3, 1.5)
        for t in range(40):
            expected_ids, expected_weights = brute_route(logits[t].tolist(), bias.tolist(), 3, 1.5)
            assert ids[t].tolist() == expected_ids
            assert weights[t].tolist() == pytest.approx(expected_weights, rel=1e-6)


def test_route_experts_ties_go_to_the_lower_expert():
    logits = torch.zeros(1, 9)
    ids, weights = route_experts(logits, torch.zeros(9), torch.ones(1, dtype=torch.int32), 4, 1.0)
    assert ids.tolist() == [[0, 1, 2, 3]]
    assert weights.tolist() == [pytest.approx([0.25] * 4)]
    bias = torch.zeros(9)
    bias[[7, 8]] = 1.0
    ids, weights = route_experts(logits, bias, torch.ones(1, dtype=torch.int32), 3, 1.0)
    assert ids.tolist() == [[0, 7, 8]]
    assert weights.tolist() == [pytest.approx([1 / 3] * 3)], "the bias must not enter the weights"


def test_route_experts_marks_padded_rows():
    slots = torch.tensor([1, 0, 2], dtype=torch.int32)
    ids, _ = route_experts(torch.randn(3, 6), torch.zeros(6), slots, 2, 1.5)
    assert ids[1].tolist() == [-1, -1]
    assert ids[[0, 2]].min() >= 0


def silu(value):
    return value * sigmoid(value)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limit", [0.0, 10.0, 2.5])
def test_swiglu_clamps_the_gate_from_above_only(dtype, limit):
    points = torch.tensor([-200, -30, -11, -10, -3, -1, -0.0, 0, 0.5, 2, 9.9, 10, 10.5, 40, 300.0])
    gate, up = (v.reshape(1, -1).to(dtype) for v in torch.meshgrid(points, points, indexing="ij"))
    expected = []
    for g, u in zip(gate[0].tolist(), up[0].tolist(), strict=True):
        if limit:
            g, u = min(g, limit), min(max(u, -limit), limit)
        expected.append(silu(g) * u)
    expected = torch.tensor([expected], dtype=torch.float64)
    assert_rounded(swiglu(gate, up, limit), expected, expected.abs() * 3e-7 + 1e-40)


@pytest.mark.parametrize("kind", ["plain", "fp4"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act_quant", [False, True])
def test_routed_experts(kind, dtype, act_quant):
    """Inputs are small integers, so that both projections and the FP8 codes behind them are
    exact."""
    generator = torch.Generator().manual_seed(6)
    hidden, inner, experts, limit = 64, 32, 4, 3.0
    stacks, values = [], []
    for out, size in ((inner, hidden), (inner, hidden), (hidden, inner)):
        made = [stored_weight("fp4", out, size, generator) for _ in range(experts)]
        values.append([v for _, _, v in made])
        if kind == "plain":
            stacks += [torch.tensor(values[-1]), None]
        else:
            stacks += [torch.stack([m[i] for m in made]) for i in (0, 1)]
    x = torch.randint(-4, 5, (7, hidden), generator=generator).to(dtype)
    ids = torch.tensor([[0, 2], [1, 3], [0, 1], [2, 3], [-1, -1], [1, 2], [0, 3]]).int()
    weights = torch.rand(7, 2, generator=generator) + 0.2
    got = routed_experts(x, ids, weights, *stacks, act_quant, limit)
    quantised = act_quant and kind == "fp4"
    clamped = 0
    for t, place in itertools.product(range(7), range(2)):
        expert = int(ids[t, place])
        if expert < 0:
            assert got[t, place].eq(0).all()
            continue
        row = quantised_row(x[t].tolist()) if quantised else x[t].tolist()
        gate, up = ([round_to(dot(row, w)[0], dtype) for w in values[m][expert]] for m in (0, 1))
        clamped += sum(g > limit for g in gate) + sum(abs(u) > limit for u in up)
        hidden_row = []
        for g, u in zip(gate, up, strict=True):
            activated = f32(f32(silu(min(g, limit))) * min(max(u, -limit), limit))
            hidden_row.append(round_to(f32(activated * weights[t, place].item()), dtype))
        if quantised:
            hidden_row = quantised_row(hidden_row)
        expected, error = product([hidden_row], values[2][expert])
        assert_rounded(got[t, place], expected[0], error[0] + expected[0].abs() * 1e-6)
    assert clamped > 20


@pytest.mark.parametrize("dtype", DTYPES)
def test_dispatch_and_combine(dtype):
    outputs, shared = torch.randn(5, 3, 16).to(dtype), torch.randn(5, 16).to(dtype)
    expected = torch.zeros(5, 16, dtype=torch.float64)
    for t, d in itertools.product(range(5), range(16)):
        routed = f32(math.fsum(outputs[t, :, d].tolist()))  # float32 before the shared expert
        expected[t, d] = f32(routed + shared[t, d].item())
    assert_rounded(combine_experts(outputs, shared), expected, 1e-6)
    ids = torch.tensor([[0, 1]] * 5, dtype=torch.int32)
    weights = torch.rand(5, 2)
    sent = dispatch_experts(shared, ids, weights)
    for out, given in zip(sent, (shared, ids, weights), strict=True):
        assert torch.equal(out, given)
