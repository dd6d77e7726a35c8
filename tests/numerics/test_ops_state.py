"""Writers and readers of per-request state: rings, blocks, group pooling, n-gram history.

Every expectation comes from the whole history of a request, never from a ring.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs.ops import engram_rows, pool_groups, write_blocks, write_ring
from graphs.ops.rows import look_back
from tests.helpers.steps import Chunk, make_step, ring_before, scattered_blocks, step_values

NUM_SLOTS = 4
DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int32)


def histories(num_positions, width, dtype=torch.float32):
    """Return distinct values for every request and position, none of them zero."""
    count = (NUM_SLOTS - 1) * num_positions * width
    values = torch.randperm(count) % 250 + 1
    return {
        slot + 1: part.to(dtype)
        for slot, part in enumerate(values.view(NUM_SLOTS - 1, num_positions, width))
    }


@st.composite
def steps(draw, longest=25, latest=40):
    """Some requests at any position with chunks of any length, in any order, and padded rows."""
    slots = draw(st.permutations(range(1, NUM_SLOTS)))[: draw(st.integers(1, NUM_SLOTS - 1))]
    chunks = [
        Chunk(slot, draw(st.integers(0, latest - longest)), draw(st.integers(1, longest)))
        for slot in slots
    ]
    return make_step(chunks, draw(st.sampled_from([0, 0, 1, 3, 9])))


# ---- rings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_ring(dtype):
    @settings(max_examples=60)
    @given(steps(), st.integers(1, 12))
    def check(step, ring_size):
        torch.manual_seed(0)
        history = histories(40, 3, dtype)
        before = torch.randint(1, 200, (NUM_SLOTS, ring_size, 3)).to(dtype)
        before[0] = 0
        ring = before.clone()
        write_ring(ring, step_values(step, history), step.positions, step.slots, step.chunk_ends)
        expected = before.clone()
        for chunk in step.chunks:
            for position in range(chunk.start, chunk.start + chunk.length):
                expected[chunk.slot, position % ring_size] = history[chunk.slot][position]
        assert torch.equal(ring, expected)
        assert ring[0].eq(0).all(), "the reserved slot must stay zero"

    check()


def test_write_ring_of_scalars():
    ring = torch.full((2, 3), 9, dtype=torch.int32)
    ring[0] = 0
    step = make_step([Chunk(1, 5, 7)], 2)
    write_ring(ring, torch.arange(1, 10).int(), step.positions, step.slots, step.chunk_ends)
    assert ring.tolist() == [[0, 0, 0], [5, 6, 7]]  # positions 9, 10, 11 at places 0, 1, 2


# ---- blocks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_write_blocks(ratio, dtype):
    per_block, max_blocks = 3, 14

    @settings(max_examples=40)
    @given(steps(), st.integers(0, 5))
    def check(step, seed):
        torch.manual_seed(seed)
        history = histories(40, 3, dtype)
        table = scattered_blocks(NUM_SLOTS, max_blocks, 50, seed)
        before = torch.randint(1, 200, (50, per_block, 3)).to(dtype)
        before[0] = 0
        cache = before.clone()
        values = step_values(step, history)
        write_blocks(cache, values, step.positions, step.slots, table, ratio)
        expected = before.clone()
        for chunk in step.chunks:
            for position in range(chunk.start, chunk.start + chunk.length):
                if position % ratio == ratio - 1:
                    entry = position // ratio
                    block = table[chunk.slot, entry // per_block]
                    expected[block, entry % per_block] = history[chunk.slot][position]
        assert torch.equal(cache, expected)
        assert cache[0].eq(0).all(), "the reserved block must stay zero"

    check()


# ---- reading back --------------------------------------------------------------------------------


@settings(max_examples=80)
@given(steps(), st.integers(1, 9), st.integers(0, 6), st.data())
def test_look_back(step, count, spare, data):
    torch.manual_seed(0)
    history = histories(40, 3)
    ring = ring_before(step, history, NUM_SLOTS, count + spare, torch.tensor(torch.nan))
    begin = data.draw(st.integers(0, step.num_tokens - 1))
    rows = slice(begin, data.draw(st.integers(begin + 1, step.num_tokens)))
    values, valid = look_back(
        step_values(step, history),
        ring,
        step.positions,
        step.slots,
        step.chunk_starts,
        count,
        rows,
    )
    for index, row in enumerate(range(*rows.indices(step.num_tokens))):
        if step.slots[row] == 0:
            continue
        for place in range(count):
            position = int(step.positions[row]) - (count - 1 - place)
            assert valid[index, place].item() == (position >= 0)
            wanted = history[int(step.slots[row])][position] if position >= 0 else torch.zeros(3)
            assert torch.equal(values[index, place], wanted)


# ---- group pooling -------------------------------------------------------------------------------


def brute_pool(rows, channels):
    """Pool raw rows [value | gate] of one group per channel in float64."""
    pooled = []
    for d in range(channels):
        gates = [row[channels + d] for row in rows]
        powers = [math.exp(g - max(gates)) for g in gates]
        total = math.fsum(powers)
        terms = [p / total * row[d] for p, row in zip(powers, rows, strict=True)]
        pooled.append(math.fsum(terms))
    return pooled


@st.composite
def cuts(draw, num_tokens):
    """Lengths of the chunks a prompt is cut into."""
    marks = sorted(draw(st.sets(st.integers(1, num_tokens - 1), max_size=8)))
    return [b - a for a, b in zip([0, *marks], [*marks, num_tokens], strict=True)]


@pytest.mark.parametrize("ratio", [2, 4])
def test_pool_groups_across_chunk_borders(ratio):
    num_tokens, channels = 21, 4
    torch.manual_seed(1)
    raw = torch.randn(num_tokens, 2 * channels) * torch.tensor([1.0] * 4 + [4.0] * 4)
    raw[3, channels:] = 90.0  # a gate far above the others
    expected = {
        end: brute_pool(raw[end - ratio + 1 : end + 1].tolist(), channels)
        for end in range(ratio - 1, num_tokens, ratio)
    }

    @settings(max_examples=60)
    @given(cuts(num_tokens), st.integers(0, 3))
    def check(lengths, num_padded):
        ring = torch.full((2, ratio + 5, 2 * channels), torch.nan)
        ring[0] = 0
        made = {}
        start = 0
        for length in lengths:
            step = make_step([Chunk(1, start, length)], num_padded)
            values = step_values(step, {1: raw})
            arguments = step.positions, step.slots
            pooled = pool_groups(values, ring, *arguments, step.chunk_starts, ratio, torch.float32)
            write_ring(ring, values, *arguments, step.chunk_ends)
            made |= {start + i: pooled[i] for i in range(length)}
            start += length
        for end, row in expected.items():
            wanted = torch.tensor(row, dtype=torch.float64)
            assert ((made[end].double() - wanted).abs() <= 3e-7 * (1 + wanted.abs())).all()
            assert torch.equal(made[end], whole[end]), "a cut changes the bits"

    step = make_step([Chunk(1, 0, num_tokens)])
    whole = pool_groups(
        raw,
        torch.zeros(2, ratio + 5, 2 * channels),
        step.positions,
        step.slots,
        step.chunk_starts,
        ratio,
        torch.float32,
    )
    check()
    rounded = pool_groups(
        raw,
        torch.zeros(2, ratio + 5, 2 * channels),
        step.positions,
        step.slots,
        step.chunk_starts,
        ratio,
        torch.bfloat16,
    )
    assert torch.equal(rounded, whole.bfloat16())


# ---- n-gram history ------------------------------------------------------------------------------


def brute_rows(ids, position, multipliers, primes, pad):
    """Hash the n-grams that end at a position (model.md 5.2)."""
    tokens = [ids[position - i] if position >= i else pad for i in range(len(multipliers))]
    mixed, rows, offset = tokens[0] * multipliers[0], [], 0
    for i in range(1, len(multipliers)):
        mixed ^= tokens[i] * multipliers[i]
        for prime in primes[i - 1]:
            rows.append(mixed % prime + offset)
            offset += prime
    return rows


@settings(max_examples=60)
@given(st.lists(st.integers(0, 99091), min_size=12, max_size=12), cuts(12), st.integers(0, 2))
def test_engram_rows_across_chunk_borders(ids, lengths, num_padded):
    multipliers = [67716810739261, 51510806800915, 30921347202721, 82619226485591]
    primes = [[16000477, 16000487], [16000667, 16000669], [16000781, 16000799]]
    flat = [p for row in primes for p in row]
    offsets = [sum(flat[:i]) for i in range(len(flat))]
    constants = (torch.tensor(v) for v in (multipliers, primes, offsets, 2))
    constants = tuple(constants)
    ring = torch.full((2, 9), 55555, dtype=torch.int32)
    ring[0] = 0
    history = {1: torch.tensor(ids, dtype=torch.int32)}
    start = 0
    for length in lengths:
        step = make_step([Chunk(1, start, length)], num_padded)
        values = step_values(step, history)
        arguments = step.positions, step.slots
        rows = engram_rows(values, ring, *arguments, step.chunk_starts, *constants)
        write_ring(ring, values, *arguments, step.chunk_ends)
        for i in range(length):
            assert rows[i].tolist() == brute_rows(ids, start + i, multipliers, primes, 2)
        start += length
