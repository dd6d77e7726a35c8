"""Index scores, selections and sparse attention against loops over float64 (model.md 3.3 - 3.9)."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs.ops import (
    fake_quantize,
    index_scores,
    pack_records,
    select_candidate_blocks,
    select_entries,
    sparse_attention,
)
from tests.helpers.compare import assert_rounded
from tests.helpers.scalar_formats import bf16
from tests.helpers.steps import (
    Chunk,
    make_step,
    ring_before,
    scattered_blocks,
    step_values,
)

NUM_SLOTS = 4
INF = math.inf


def ones(count):
    return torch.ones(count, dtype=torch.int32)


def num_visible(position, slot, ratio):
    return (position + 1) // ratio if slot else 0


# ---- index scores --------------------------------------------------------------------------------


def fill_blocks(entries, table, num_blocks, per_block, filler):
    """Place per-request entries [slot -> [N, ...]] in a block cache."""
    example = next(iter(entries.values()))
    cache = filler.expand(num_blocks, per_block, *example.shape[1:]).clone()
    for slot, rows in entries.items():
        for j, row in enumerate(rows):
            cache[table[slot, j // per_block], j % per_block] = row
    return cache


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "records"])
@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("length", [1, 9])  # fewer and more tokens than slots
def test_index_scores(stored, ratio, length):
    heads, dim, per_block, max_blocks = 3, 32, 4, 6
    dtype = torch.bfloat16 if stored == "bfloat16" else torch.float32
    table = scattered_blocks(NUM_SLOTS, max_blocks, 30)
    keys = {slot: torch.randn(24, dim).to(dtype) for slot in range(1, NUM_SLOTS)}
    filler = torch.tensor(torch.nan, dtype=dtype)  # stale: must not be read
    if stored == "records":
        packed = {slot: pack_records(k, "fp4_32") for slot, k in keys.items()}
        cache = fill_blocks(packed, table, 30, per_block, torch.tensor(255, dtype=torch.uint8))
        keys = {slot: fake_quantize(k, "fp4_32") for slot, k in keys.items()}
    else:
        cache = fill_blocks(keys, table, 30, per_block, filler)
    step = make_step([Chunk(2, 11, length), Chunk(1, 0, min(length, 3))], 1)
    query = torch.randn(step.num_tokens, heads, dim).to(dtype)
    weights = torch.randn(step.num_tokens, heads).to(dtype)
    got = index_scores(query, weights, cache, table, step.slots, step.positions, ratio)
    assert got.shape == (step.num_tokens, max_blocks * per_block)
    assert got.dtype == torch.float32
    for t in range(step.num_tokens):
        slot, position = int(step.slots[t]), int(step.positions[t])
        visible = num_visible(position, slot, ratio)
        assert got[t, visible:].eq(-INF).all()
        for j in range(visible):
            terms = []
            for h in range(heads):
                pairs = zip(query[t, h].tolist(), keys[slot][j].tolist(), strict=True)
                terms.append(max(math.fsum(a * b for a, b in pairs), 0.0) * weights[t, h].item())
            expected = math.fsum(terms) * dim**-0.5 * heads**-0.5
            assert got[t, j].item() == pytest.approx(expected, abs=1e-5), (t, j)


# ---- selections ----------------------------------------------------------------------------------


def brute_select(row, topk, allowed):
    """Higher score first, then lower index; ascending, filled with -1."""
    usable = [j for j, s in enumerate(row) if s > -INF and j in allowed]
    best = sorted(usable, key=lambda j: (-row[j], j))[:topk]
    return sorted(best) + [-1] * (topk - len(best))


def brute_candidates(row, visible, topk_blocks, block_size):
    """Keep the best blocks by their best visible entry, the newest one pinned."""
    num_blocks = -(-len(row) // block_size)
    best = [
        max(row[b * block_size : min((b + 1) * block_size, visible)], default=-INF)
        for b in range(num_blocks)
    ]
    if visible:
        best[(visible - 1) // block_size] = INF
    return brute_select(best, topk_blocks, range(num_blocks))


# Few distinct values: most comparisons are ties. -0.0 ties with 0.0.
TIED = st.sampled_from([0.0, -0.0, 0.0, 1.0, -1.0, 2.5, 1e-40, -3e38, 3e38])


@st.composite
def score_rows(draw):
    """Rows of scores whose visible entries are a prefix, as a step makes them."""
    width = draw(st.integers(1, 23))
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        visible = draw(st.integers(0, width))
        rows.append([draw(TIED) for _ in range(visible)] + [-INF] * (width - visible))
    return rows


@settings(max_examples=150)
@given(score_rows(), st.integers(1, 30))
def test_select_entries(rows, topk):
    got = select_entries(torch.tensor(rows), topk, None, 4)
    assert got.dtype == torch.int32
    assert got.tolist() == [brute_select(row, topk, range(len(row))) for row in rows]


@settings(max_examples=150)
@given(score_rows(), st.integers(1, 9), st.integers(1, 5), st.data())
def test_select_entries_inside_candidates(rows, topk, block_size, data):
    num_blocks = -(-len(rows[0]) // block_size)
    width = data.draw(st.integers(1, num_blocks + 2))
    candidates, allowed = [], []
    for _ in rows:
        chosen = data.draw(st.sets(st.integers(0, num_blocks - 1), max_size=width))
        candidates.append(sorted(chosen) + [-1] * (width - len(chosen)))
        allowed.append({b * block_size + i for b in chosen for i in range(block_size)})
    got = select_entries(
        torch.tensor(rows), topk, torch.tensor(candidates, dtype=torch.int32), block_size
    )
    expected = [brute_select(row, topk, inside) for row, inside in zip(rows, allowed, strict=True)]
    assert got.tolist() == expected


@settings(max_examples=150)
@given(score_rows(), st.integers(1, 8), st.integers(1, 5), st.sampled_from([1, 2]), st.booleans())
def test_select_candidate_blocks(rows, topk_blocks, block_size, ratio, is_padded):
    visible = [sum(s > -INF for s in row) for row in rows]
    positions = [max(v * ratio - 1, 0) for v in visible]
    slots = [1 if v else 0 for v in visible]
    if is_padded:  # a padded row has no visible entry whatever its position says
        rows = [*rows, [-INF] * len(rows[0])]
        visible, positions, slots = [*visible, 0], [*positions, 5], [*slots, 0]
    got = select_candidate_blocks(
        torch.tensor(rows),
        torch.tensor(positions, dtype=torch.int32),
        torch.tensor(slots, dtype=torch.int32),
        ratio,
        topk_blocks,
        block_size,
    )
    expected = [
        brute_candidates(row, v, topk_blocks, block_size)
        for row, v in zip(rows, visible, strict=True)
    ]
    assert got.tolist() == expected


def test_newest_block_is_pinned_though_it_is_partial_and_worst():
    row = [5.0, 4.0, 3.0, 2.0, 9.0, 1.0, -8.0, -INF, -INF]
    arguments = torch.tensor([6], dtype=torch.int32), ones(1), 1
    assert select_candidate_blocks(torch.tensor([row]), *arguments, 2, 2).tolist() == [[2, 3]]
    assert select_candidate_blocks(torch.tensor([row]), *arguments, 1, 2).tolist() == [[3]]
    # At an odd ratio-2 position the newest entry is the one before the open group.
    arguments = torch.tensor([14], dtype=torch.int32), ones(1), 2
    assert select_candidate_blocks(torch.tensor([row]), *arguments, 1, 2).tolist() == [[3]]


def test_select_entries_at_production_size():
    scores = torch.randn(3, 20480).relu()  # half of the entries tie at zero
    scores[0, 300:] = 0
    scores[1, 700:] = -INF
    got = select_entries(scores, 512, None, 8)
    for t in range(3):
        assert got[t].tolist() == brute_select(scores[t].tolist(), 512, range(20480))


# ---- attention -----------------------------------------------------------------------------------


def brute_attention(query, keys, sink, scale, dtype=torch.float32):
    """One token: query [heads][D], keys [K][D] as lists -> (output, sum of |terms|), float64."""
    out, size = [], []
    for h, q in enumerate(query):
        z = [math.fsum(a * b for a, b in zip(q, k, strict=True)) * scale for k in keys]
        largest = max(z)
        p = [math.exp(v - largest) for v in z]
        total = math.fsum(p) + math.exp(sink[h] - largest)
        if dtype == torch.bfloat16:
            p = [bf16(v) for v in p]  # the numerator only
        columns = list(zip(*keys, strict=True))
        out.append(
            [math.fsum(a * v for a, v in zip(p, col, strict=True)) / total for col in columns]
        )
        size.append(
            [math.fsum(a * abs(v) for a, v in zip(p, col, strict=True)) / total for col in columns]
        )
    return torch.tensor(out, dtype=torch.float64), torch.tensor(size, dtype=torch.float64)


def attention_case(chunks, num_padded, topk, dtype, stored, window, ring_size, ratio=1):
    """Build random arguments of `sparse_attention` and the key list of every real token."""
    dim, heads, per_block, max_blocks, num_blocks = 32, 2, 4, 40, 130
    length = max(c.start + c.length for c in chunks)
    step = make_step(chunks, num_padded)
    latents = {s: torch.randn(length, dim).to(dtype) for s in range(1, NUM_SLOTS)}
    entries = {s: torch.randn(length // ratio + 1, dim).to(dtype) for s in range(1, NUM_SLOTS)}
    table = scattered_blocks(NUM_SLOTS, max_blocks, num_blocks)
    window_values, block_values, garbage = latents, entries, torch.tensor(1e3, dtype=dtype)
    if stored == "records":
        window_values = {s: pack_records(v, "fp8_32") for s, v in latents.items()}
        block_values = {s: pack_records(v, "fp4_16") for s, v in entries.items()}
        latents = {s: fake_quantize(v, "fp8_32") for s, v in latents.items()}
        entries = {s: fake_quantize(v, "fp4_16") for s, v in entries.items()}
        garbage = torch.tensor(0x7A, dtype=torch.uint8)
    cache = fill_blocks(block_values, table, num_blocks, per_block, garbage)
    indices = torch.full((step.num_tokens, max(topk, 1)), -1, dtype=torch.int32)
    keys = []
    for t in range(step.num_real):
        slot, position = int(step.slots[t]), int(step.positions[t])
        visible = num_visible(position, slot, ratio)
        chosen = torch.randperm(visible)[:topk].sort().values.tolist() if topk else []
        indices[t, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
        first = max(0, position - window + 1)
        listed = [latents[slot][s] for s in range(first, position + 1)]
        keys.append(torch.stack(listed + [entries[slot][j] for j in chosen]).tolist())
    query, sink = torch.randn(step.num_tokens, heads, dim).to(dtype), torch.randn(heads)
    arguments = (
        query,
        step_values(step, window_values),
        ring_before(step, window_values, NUM_SLOTS, ring_size, garbage),
        cache if topk else None,
        indices if topk else None,
        table,
        step.slots,
        step.positions,
        step.chunk_starts,
        sink,
        window,
        dim**-0.5,
    )
    return step, arguments, keys


CHUNKS = {
    "decode": [Chunk(3, 30, 1), Chunk(1, 0, 1), Chunk(2, 7, 1)],
    "prefill": [Chunk(2, 0, 19), Chunk(1, 5, 3)],
    "longer than the ring": [Chunk(1, 13, 29), Chunk(3, 2, 1)],
    "more than one token block": [Chunk(2, 3, 90)],
}


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "records", "bfloat16 records"])
@pytest.mark.parametrize("chunks", list(CHUNKS.values()), ids=list(CHUNKS))
@pytest.mark.parametrize("topk", [0, 6])
def test_sparse_attention(stored, chunks, topk):
    dtype = torch.bfloat16 if "bfloat16" in stored else torch.float32
    kind = "records" if "records" in stored else "plain"
    step, arguments, keys = attention_case(chunks, 2, topk, dtype, kind, 8, 14)
    got = sparse_attention(*arguments)
    assert got.dtype == dtype
    query, sink, scale = arguments[0], arguments[9].tolist(), arguments[11]
    for t in range(step.num_real):
        expected, size = brute_attention(query[t].tolist(), keys[t], sink, scale, dtype)
        # In bfloat16 a probability may fall on the other side of a rounding boundary.
        error = size * (2e-6 if dtype == torch.float32 else 2e-4)
        assert_rounded(got[t], expected, error)


def test_a_token_alone_sees_itself_and_the_sink():
    step = make_step([Chunk(1, 0, 1)])
    key, sink = torch.randn(1, 32), torch.tensor([0.3, -2.0])
    query = torch.randn(1, 2, 32)
    ring = torch.full((2, 9, 32), torch.nan)
    ring[0] = 0
    table = torch.zeros(2, 3, dtype=torch.int32)
    cache = torch.randn(3, 4, 32)
    none = torch.full((1, 5), -1, dtype=torch.int32)
    ring[1] = 50.0
    got = sparse_attention(
        query,
        key,
        ring,
        cache,
        none,
        table,
        step.slots,
        step.positions,
        step.chunk_starts,
        sink,
        4,
        1.0,
    )
    for h in range(2):
        z = float(query[0, h].double() @ key[0].double())
        weight = 1 / (1 + math.exp(sink[h].item() - z))
        torch.testing.assert_close(got[0, h], key[0] * weight, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("stored", ["plain", "records"])
@pytest.mark.parametrize("where", ["ring", "blocks"])
def test_stale_non_finite_state_does_not_leak(stored, where):
    """A request that overflowed leaves NaN behind; the next one in its slot and blocks is clean."""
    step = make_step([Chunk(1, 0, 1)])
    rings = {"ring": torch.ones(2, 9, 32), "blocks": torch.ones(3, 4, 32)}
    rings[where][1:] = torch.nan
    key, ring, cache = torch.randn(1, 32), rings["ring"], rings["blocks"]
    if stored == "records":
        key, ring = pack_records(key, "fp8_32"), pack_records(ring, "fp8_32")
        cache = pack_records(cache, "fp4_16")
    got = sparse_attention(
        torch.randn(1, 2, 32),
        key,
        ring,
        cache,
        torch.full((1, 5), -1, dtype=torch.int32),
        torch.tensor([[0, 0], [1, 2]], dtype=torch.int32),
        step.slots,
        step.positions,
        step.chunk_starts,
        torch.zeros(2),
        4,
        1.0,
    )
    assert got.isfinite().all()


def test_window_includes_the_token_and_cuts_the_ninth():
    """One-hot keys: the output itself says which positions were seen."""
    length, window = 20, 8
    for start in (0, 5, 19):  # all in one chunk, a part from the ring, all but one from the ring
        step = make_step([Chunk(1, start, length - start)])
        history = {1: torch.eye(32)[:length]}
        got = sparse_attention(
            torch.zeros(step.num_tokens, 1, 32),
            step_values(step, history),
            ring_before(step, history, 2, window + 6, torch.tensor(99.0)),
            None,
            None,
            torch.zeros(2, 1, dtype=torch.int32),
            step.slots,
            step.positions,
            step.chunk_starts,
            torch.tensor([0.0]),
            window,
            1.0,
        )
        for row, t in enumerate(range(start, length)):
            seen = range(max(0, t - window + 1), t + 1)
            expected = torch.zeros(32)
            expected[list(seen)] = 1 / (len(seen) + 1)  # + 1: the sink
            torch.testing.assert_close(got[row, 0], expected, rtol=1e-6, atol=0)


def test_duplicates_of_window_and_selection_count_twice():
    step = make_step([Chunk(1, 0, 2)])
    latent = torch.eye(32)[:2]
    cache = torch.zeros(3, 4, 32)
    cache[1, :2] = latent
    table = torch.tensor([[0, 0], [1, 2]], dtype=torch.int32)
    indices = torch.tensor([[0, -1, -1], [0, 1, -1]], dtype=torch.int32)
    got = sparse_attention(
        torch.zeros(2, 1, 32),
        latent,
        torch.zeros(2, 9, 32),
        cache,
        indices,
        table,
        step.slots,
        step.positions,
        step.chunk_starts,
        torch.tensor([0.0]),
        4,
        1.0,
    )
    torch.testing.assert_close(got[0, 0, :2], torch.tensor([2 / 3, 0.0]))
    torch.testing.assert_close(got[1, 0, :2], torch.tensor([2 / 5, 2 / 5]))


def test_bfloat16_rounds_the_numerator_and_not_the_denominator():
    """Search a sink for which the three possible roundings give three different results."""
    p = math.exp(-0.3)
    step = make_step([Chunk(1, 0, 2)])
    latents = torch.zeros(2, 32)
    latents[0, 1] = latents[0, 2] = 1.0
    latents[1, 0] = 2.0
    query = torch.zeros(2, 1, 32)
    query[1, 0, 1] = bf16(-0.3)
    p = math.exp(bf16(-0.3))
    tried = 0
    for sink in [i / 64 for i in range(-100, 100)]:
        total = 1 + p + math.exp(sink)
        correct = bf16(bf16(p) / total)
        others = {bf16(p / total), bf16(bf16(p) / (total - p + bf16(p)))}
        if correct in others or len({bf16(bf16(p) / total * f) for f in (0.99999, 1.00001)}) > 1:
            continue
        tried += 1
        got = sparse_attention(
            query.bfloat16(),
            latents.bfloat16(),
            torch.zeros(2, 9, 32, dtype=torch.bfloat16),
            None,
            None,
            torch.zeros(2, 1, dtype=torch.int32),
            step.slots,
            step.positions,
            step.chunk_starts,
            torch.tensor([sink]),
            4,
            1.0,
        )
        assert got[1, 0, 2].item() == correct
    assert tried > 5


@pytest.mark.parametrize("sink", [-200.0, 60.0, 200.0])
def test_extreme_sinks_stay_finite(sink):
    step, arguments, keys = attention_case(CHUNKS["prefill"], 0, 6, torch.float32, "plain", 8, 14)
    arguments = (*arguments[:9], torch.full((2,), sink), *arguments[10:])
    got = sparse_attention(*arguments)
    for t, d in itertools.product((0, 5, 21), range(2)):
        expected, size = brute_attention(
            arguments[0][t].tolist(), keys[t], [sink] * 2, arguments[11]
        )
        assert_rounded(got[t, d], expected[d], size[d] * 1e-5 + 1e-38)
