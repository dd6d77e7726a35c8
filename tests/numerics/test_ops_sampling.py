"""The sampler against a scalar Philox, exhaustive tiny distributions, and chi-square bounds."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import graphs.ops.sampling as sampling
from graphs.ops import sample_tokens, token_logprobs

MASK = 0xFFFFFFFF


# ---- random numbers ------------------------------------------------------------------------------


def brute_philox(counter, key):
    """Philox4x32-10 on Python integers (Salmon et al., SC 2011)."""
    x, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [(b >> 32) ^ x[1] ^ k[0], b & MASK, (a >> 32) ^ x[3] ^ k[1], a & MASK]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return x


# Known answers of the Random123 distribution: counter, key, output.
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([MASK] * 4, [MASK] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_scalar_philox_gives_the_known_answers(counter, key, expected):
    assert brute_philox(counter, key) == expected


def test_philox_gives_the_known_answer_of_zeros():
    zero = torch.zeros(1, dtype=torch.int64)
    assert [int(w) for w in sampling.philox(zero, zero, 0)] == KNOWN_ANSWERS[0][2]


_INT64 = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(st.tuples(_INT64, _INT64), min_size=1, max_size=5), st.integers(0, MASK))
def test_philox_equals_the_scalar_one(pairs, purpose):
    seeds, positions = (torch.tensor(v) for v in zip(*pairs, strict=True))
    words = torch.stack(sampling.philox(seeds, positions, purpose), 1).tolist()
    unit = sampling.uniform(seeds, positions, purpose).tolist()
    for (seed, position), got, u in zip(pairs, words, unit, strict=True):
        seed, position = seed % 2**64, position % 2**64
        counter = [position & MASK, position >> 32, purpose, 0]
        expected = brute_philox(counter, [seed & MASK, seed >> 32])
        assert got == expected
        assert Fraction(u) == Fraction((expected[0] >> 5) * 2**26 + (expected[1] >> 6), 2**53)
        assert 0 <= u < 1


# ---- what a draw may return ----------------------------------------------------------------------


def kept_tokens(logits, temperature, top_p, top_k, min_p=0.0):
    """Return {token: probability}, in order of falling probability (ties: lower id first)."""
    largest = max(logits)
    powers = [math.exp((v - largest) / temperature) for v in logits]
    total = math.fsum(powers)
    order = sorted(range(len(logits)), key=lambda i: (-powers[i], i))
    kept, before = {}, 0.0
    for token in order:
        if before > top_p and kept:
            break
        kept[token] = powers[token] / total
        before += powers[token] / total
    if top_k > 0:
        kept = dict(list(kept.items())[:top_k])
    least = min_p * max(kept.values())
    kept = {token: p for token, p in kept.items() if p >= least}
    mass = math.fsum(kept.values())
    return {token: p / mass for token, p in kept.items()}


def draw_at(monkeypatch, points, logits, temperature, top_p, top_k, min_p=0.0):
    """Draw once per given uniform number."""
    count = len(points)
    chosen = torch.tensor(points, dtype=torch.float64)
    monkeypatch.setattr(sampling, "uniform", lambda *_: chosen)
    return sample_tokens(
        torch.tensor(logits).expand(count, -1).contiguous(),
        torch.full((count,), temperature),
        torch.full((count,), top_p),
        torch.full((count,), top_k, dtype=torch.int32),
        torch.full((count,), min_p),
        torch.zeros(count, dtype=torch.int64),
        torch.zeros(count, dtype=torch.int64),
    ).tolist()


CASES = [
    ([0.0, 1.0, 2.0, -1.0], 1.0, 1.0, -1),
    ([0.0, 1.0, 2.0, -1.0], 0.5, 1.0, -1),
    ([0.0, 1.0, 2.0, -1.0], 3.0, 1.0, 0),
    ([0.0, 1.0, 2.0, -1.0], 1.0, 0.7, -1),
    ([0.0, 1.0, 2.0, -1.0], 1.0, 0.6, -1),
    ([0.0, 1.0, 2.0, -1.0], 1.0, 1e-6, -1),
    ([0.0, 1.0, 2.0, -1.0], 1.0, 1.0, 2),
    ([0.0, 1.0, 2.0, -1.0], 1.0, 0.95, 2),
    ([0.0, 1.0, 2.0, -1.0], 1.0, 0.5, 99),
    ([1.0, 1.0, 1.0, 1.0], 1.0, 0.5, -1),  # the mass before the third token is exactly top_p
    ([1.0, 1.0, 1.0, 1.0], 1.0, 0.49, -1),
    ([1.0, 1.0, 1.0, 1.0], 1.0, 1.0, 3),  # ties: the lowest ids stay
    ([-math.inf, 0.0, -math.inf, 1.0], 1.0, 1.0, -1),
    ([300.0, -300.0, 300.0], 1.0, 1.0, -1),
    ([7.0], 1.0, 1.0, -1),
    ([3.0, 3.0, 9.0], 1e-6, 1.0, -1),
    ([0.0, 1.0, 2.0, -1.0], 1.0, 1.0, -1, 0.1),
    ([0.0, 1.0, 2.0, -1.0], 1.0, 0.7, 3, 0.3),
    ([0.0, 1.0, 1.0, -1.0], 1.0, 1.0, -1, 1.0),  # all tokens as likely as the first stay
    ([0.0, 1.0, 2.0, -1.0], 2.0, 1.0, 1, 0.01),
]


@pytest.mark.parametrize("case", CASES)
def test_draws_are_the_inverse_distribution(monkeypatch, case):
    """A fine grid of uniform numbers hits every token as often as its probability says."""
    expected = kept_tokens(*case)
    grid = [(i + 0.5) / 4000 for i in range(4000)]
    drawn = draw_at(monkeypatch, [0.0, *grid, 1 - 2.0**-53], *case)
    assert set(drawn) <= set(expected)
    for token, probability in expected.items():
        assert abs(drawn.count(token) - 4000 * probability) <= 3, token
    order = list(expected)
    ranks = [order.index(token) for token in drawn]
    assert ranks == sorted(ranks), "tokens must come in order of falling probability"


def test_zero_probability_is_never_drawn(monkeypatch):
    logits = [-math.inf, 0.0, -2000.0, -math.inf]
    assert set(draw_at(monkeypatch, [0.0, 0.5, 1 - 2.0**-53], logits, 1.0, 1.0, -1)) == {1}


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from([-2.0, 0.0, 0.5, 1.0, 3.0]), min_size=1, max_size=6),
    st.sampled_from([0.3, 1.0, 2.0]),
    st.sampled_from([0.05, 0.31, 0.77, 1.0]),
    st.integers(-1, 7),
)
def test_only_kept_tokens_are_drawn(logits, temperature, top_p, top_k):
    count = 200
    drawn = sample_tokens(
        torch.tensor(logits).expand(count, -1).contiguous(),
        torch.full((count,), temperature),
        torch.full((count,), top_p),
        torch.full((count,), top_k, dtype=torch.int32),
        torch.zeros(count),
        torch.arange(count) * 7919,
        torch.arange(count),
    )
    assert set(drawn.tolist()) <= set(kept_tokens(logits, temperature, top_p, top_k))


# Bound stated beforehand: the chi-square value that a right sampler passes with probability 1e-6.
CHI_SQUARE_LIMIT = {2: 27.63, 4: 33.38, 7: 40.52}  # degrees of freedom -> upper 1e-6 quantile


@pytest.mark.parametrize("vary", ["seed", "position", "both"])
@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, -1), (1.0, 5), (0.6, -1)])
def test_chi_square(vary, top_p, top_k):
    logits = [0.3, -0.2, 1.1, 0.0, -1.0, 0.9, 0.4, -0.5]
    count = 20000
    fixed = torch.full((count,), 123456789)
    index = torch.arange(count)
    drawn = sample_tokens(
        torch.tensor(logits).expand(count, -1).contiguous(),
        torch.full((count,), 0.9),
        torch.full((count,), top_p),
        torch.full((count,), top_k, dtype=torch.int32),
        torch.zeros(count),
        fixed if vary == "position" else index,
        fixed if vary == "seed" else index,
    ).tolist()
    expected = kept_tokens(logits, f32_of(0.9), f32_of(top_p), top_k)
    assert set(drawn) == set(expected)
    statistic = sum(
        (drawn.count(token) - count * p) ** 2 / (count * p) for token, p in expected.items()
    )
    assert statistic < CHI_SQUARE_LIMIT[len(expected) - 1]


def f32_of(value):
    return torch.tensor(value).item()


def test_consecutive_draws_are_independent():
    """Pairs of a fair coin at positions p and p + 1: four outcomes, 3 degrees of freedom."""
    count = 20000
    drawn = sample_tokens(
        torch.zeros(count, 2),
        torch.ones(count),
        torch.ones(count),
        torch.full((count,), -1, dtype=torch.int32),
        torch.zeros(count),
        torch.full((count,), 42),
        torch.arange(count),
    )
    pairs = (drawn[:-1:2] * 2 + drawn[1::2]).tolist()
    expected = count / 2 / 4
    statistic = sum((pairs.count(k) - expected) ** 2 / expected for k in range(4))
    assert statistic < 30.66  # upper 1e-6 quantile


# ---- greedy, rows, log-probabilities -------------------------------------------------------------


def test_temperature_zero_is_an_argmax_with_the_lowest_id_on_ties():
    logits = torch.tensor([[0.0, 5.0, 5.0, 1.0], [2.0, 2.0, 2.0, 2.0], [-9.0, -8.0, -7.0, -7.0]])
    logits = torch.cat((logits, torch.tensor([[-math.inf, -1.0, -math.inf, -1.0]])))
    rows = logits.shape[0]
    for top_p, top_k in ((1.0, -1), (0.01, 1), (0.5, 2)):
        drawn = sample_tokens(
            logits,
            torch.zeros(rows),
            torch.full((rows,), top_p),
            torch.full((rows,), top_k, dtype=torch.int32),
            torch.zeros(rows),
            torch.arange(rows),
            torch.arange(rows),
        )
        assert drawn.tolist() == [1, 0, 2, 1]
    wide = torch.zeros(3, 70000)
    wide[1, 69999] = wide[1, 35000] = 1.0
    zeros, nothing = torch.zeros(3), torch.zeros(3, dtype=torch.int64)
    drawn = sample_tokens(wide, zeros, zeros + 1, nothing.int(), zeros, nothing, nothing)
    assert drawn.tolist() == [0, 35000, 0]


def test_rows_draw_by_their_own_parameters():
    logits = torch.randn(40, 30)
    temperature = torch.rand(40) * 2 * (torch.arange(40) % 4 > 0)
    top_p, top_k = torch.rand(40) * 0.9 + 0.1, torch.randint(-1, 9, (40,)).int()
    seeds, positions = torch.randint(-(2**60), 2**60, (40,)), torch.randint(0, 99, (40,))
    rows = (logits, temperature, top_p, top_k, torch.zeros(40), seeds, positions)
    together = sample_tokens(*rows)
    for i in range(40):
        assert sample_tokens(*(r[i : i + 1] for r in rows)).item() == together[i].item()
        if temperature[i] > 0:
            kept = kept_tokens(
                logits[i].tolist(), temperature[i].item(), top_p[i].item(), top_k[i].item()
            )
            u = sampling.uniform(seeds[i : i + 1], positions[i : i + 1], 0).item()
            masses = dict(zip(kept, itertools.accumulate(kept.values()), strict=True))
            assert together[i].item() == next(t for t, mass in masses.items() if u < mass)
        else:
            assert together[i].item() == logits[i].argmax().item()


def test_token_logprobs():
    logits = torch.randn(6, 50) * torch.tensor([1, 5, 30, 300, 1e-3, 1])[:, None]
    logits[5, 3:] = -math.inf
    targets = torch.tensor([0, 49, 7, 3, 9, 2], dtype=torch.int32)
    got = token_logprobs(logits, targets)
    for row, target, value in zip(logits.tolist(), targets.tolist(), got.tolist(), strict=True):
        largest = max(row)
        total = math.fsum(math.exp(v - largest) for v in row)
        assert value == pytest.approx(row[target] - largest - math.log(total), rel=2e-7, abs=1e-7)
