"""A row's result is the same bits alone, elsewhere, among other rows, padded, and on any
threads."""

import pytest
import torch
from torch.utils import _pytree as pytree

from graphs import ops
from graphs.op import OPS
from graphs.ops.linear import sample_weight
from graphs.ops.rows import matmul_rows
from tests.helpers.steps import (
    Chunk,
    make_step,
    ring_before,
    scattered_blocks,
    step_values,
)

NUM_ROWS = 69
HIDDEN, INNER = 160, 96
FLOATS = (torch.float32, torch.bfloat16)
THREADS = (1, 2, 4)
# Ops on whole steps (see below) and ops that only move rows or write state (test_ops_state.py).
STEP_OPS = {"sparse_attention", "pool_groups", "engram_rows"}
MOVERS = {"select_rows", "write_ring", "write_blocks"}


@pytest.fixture(autouse=True)
def restore_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def randn(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


def slots(num_rows):
    return torch.randint(1, 4, (num_rows,), dtype=torch.int32)


# ---- ops on independent rows ---------------------------------------------------------------------
# name -> function of (number of rows, activation dtype) giving per-row arguments and a call.


def _norm(n, dtype):
    weight = randn(HIDDEN)
    return (randn(n, HIDDEN, dtype=dtype),), lambda x: ops.rms_norm(x, weight, 1e-20)


def _rope_table(n, dtype):
    positions = torch.randint(0, 100_000, (n,), dtype=torch.int32)
    frequencies = torch.rand(16)
    return (positions,), lambda p: ops.rope_table(p, frequencies, 2)


def _apply_rope(n, dtype):
    table = ops.rope_table(torch.randint(0, 9999, (n,), dtype=torch.int32), torch.rand(16), 1)
    rows = randn(n, 3, 40, dtype=dtype), table
    return rows, lambda x, t: ops.apply_rope(x, t, True)


def _hc_mixes(n, dtype):
    fixed = randn(24, 4 * HIDDEN) * 0.1, torch.rand(3), randn(24)
    return (randn(n, 4, HIDDEN, dtype=dtype),), lambda s: ops.hc_mixes(s, *fixed, 20, 1e-6, 1e-20)


def _hc_pre(n, dtype):
    return (randn(n, 4, HIDDEN, dtype=dtype), torch.rand(n, 4)), ops.hc_pre


def _hc_post(n, dtype):
    rows = randn(n, HIDDEN, dtype=dtype), randn(n, 4, HIDDEN, dtype=dtype), torch.rand(n, 4)
    return (*rows, torch.rand(n, 4, 4)), ops.hc_post


def _linear(kind, num_out):
    def case(n, dtype):
        weight = sample_weight(1, num_out, HIDDEN, kind)
        rows = (randn(n, HIDDEN, dtype=dtype),)
        return rows, lambda x: ops.linear(x, *weight, True, dtype)

    return case


def _grouped_linear(n, dtype):
    weight = sample_weight(1, 96, 64, "fp8")
    return (randn(n, 3, 64, dtype=dtype),), lambda x: ops.grouped_linear(x, *weight)


def _route(n, dtype):
    bias = randn(24)
    rows = randn(n, 24) * 4, torch.randint(0, 3, (n,), dtype=torch.int32)
    return rows, lambda z, s: ops.route_experts(z, bias, s, 5, 1.5)


def _experts(kind):
    def case(n, dtype):
        stacks = []
        for out, size in ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)):
            made = [sample_weight(e, out, size, kind) for e in range(6)]
            scales = [s for _, s in made if s is not None]
            stacks += [torch.stack([w for w, _ in made]), torch.stack(scales) if scales else None]
        ids = torch.stack([torch.randperm(6)[:3].sort().values for _ in range(n)]).int()
        ids[::5] = -1
        rows = randn(n, HIDDEN, dtype=dtype), ids, torch.rand(n, 3)
        return rows, lambda x, i, w: ops.routed_experts(x, i, w, *stacks, True, 1.5)

    return case


def _swiglu(n, dtype):
    rows = randn(n, INNER, dtype=dtype) * 4, randn(n, INNER, dtype=dtype)
    return rows, lambda g, u: ops.swiglu(g, u, 3.0)


def _dispatch(n, dtype):
    ids = torch.randint(0, 9, (n, 3), dtype=torch.int32)
    return (randn(n, HIDDEN, dtype=dtype), ids, torch.rand(n, 3)), ops.dispatch_experts


def _combine(n, dtype):
    rows = randn(n, 6, HIDDEN, dtype=dtype), randn(n, HIDDEN, dtype=dtype)
    return rows, ops.combine_experts


def _embed(n, dtype):
    weight = randn(50, HIDDEN)
    ids = torch.randint(0, 50, (n,), dtype=torch.int32)
    return (ids,), lambda i: ops.embed_streams(i, weight, 4, dtype)


def _lookup(n, dtype):
    table, scale = sample_weight(1, 64, 32, "fp8")
    scale = scale.repeat_interleave(32, 0)
    rows = torch.randint(0, 64, (n, 6))
    return (rows,), lambda r: ops.engram_lookup(r, table, scale, dtype)


def _gate(n, dtype):
    weights = randn(4, HIDDEN), randn(4, HIDDEN)
    rows = randn(n, 4, HIDDEN, dtype=dtype), randn(n, 5 * HIDDEN, dtype=dtype)
    return rows, lambda s, kv: ops.engram_gate(s, kv, *weights, 1e-20)


def _quantize(n, dtype):
    return (randn(n, 192, dtype=dtype),), lambda x: [
        made(x, fmt)
        for made in (ops.fake_quantize, ops.pack_records)
        for fmt in ("fp8_32", "fp4_32", "fp4_16")
    ]


def _scores(stored, per_block=16, heads=4):
    def case(n, dtype):
        table = scattered_blocks(4, 7, 25)
        keys = randn(25, per_block, 64, dtype=dtype)
        keys = ops.pack_records(keys, "fp4_32") if stored == "records" else keys
        rows = randn(n, heads, 64, dtype=dtype), randn(n, heads, dtype=dtype), slots(n)
        rows = (*rows, torch.randint(0, 7 * per_block, (n,), dtype=torch.int32))
        return rows, lambda q, w, s, p: ops.index_scores(q, w, keys, table, s, p, 1)

    return case


def _visible_scores(n):
    scores = randn(n, 200).relu()
    visible = torch.randint(1, 201, (n,), dtype=torch.int32)
    return scores.masked_fill(torch.arange(200) >= visible[:, None], -torch.inf), visible


def _select(n, dtype):
    scores, _ = _visible_scores(n)
    blocks = torch.stack([torch.randperm(50)[:20].sort().values for _ in range(n)]).int()
    return (scores, blocks), lambda s, b: ops.select_entries(s, 40, b, 4)


def _candidates(n, dtype):
    scores, visible = _visible_scores(n)
    rows = scores, visible - 1, slots(n)
    return rows, lambda s, p, r: ops.select_candidate_blocks(s, p, r, 1, 20, 4)


def _sample(n, dtype):
    rows = randn(n, 333) * 3, torch.rand(n) * (torch.arange(n) % 3), torch.rand(n) * 0.9 + 0.1
    rows = (*rows, torch.randint(-1, 50, (n,), dtype=torch.int32), torch.rand(n) * 0.2)
    return (*rows, torch.randint(-(2**60), 2**60, (n,)), torch.arange(n)), ops.sample_tokens


def _logprobs(n, dtype):
    return (randn(n, 333), torch.randint(0, 333, (n,), dtype=torch.int32)), ops.token_logprobs


def _constrain(n, dtype):
    masks = torch.randint(-(2**31), 2**31, (n, 11)).int()
    ids = torch.stack([torch.randperm(333)[:4] for _ in range(n)]).int()
    return (randn(n, 333), masks, ids, randn(n, 4)), ops.constrain_logits


def _penalize(n, dtype):
    table, tokens = scattered_blocks(4, 7, 25), torch.randint(0, 333, (25, 8)).int()
    prompts, outputs = torch.randint(1, 20, (2, n)).int()
    rows = randn(n, 333), slots(n), prompts, prompts + outputs, *(torch.rand(3, n) + 0.5)
    return rows, lambda x, *rest: ops.penalize_logits(x, tokens, table, *rest)


def _top_logprobs(n, dtype):
    return (randn(n, 333), torch.randint(0, 333, (n,), dtype=torch.int32)), ops.top_logprobs


ROW_CASES = {
    "rms_norm": _norm,
    "rope_table": _rope_table,
    "apply_rope": _apply_rope,
    "hc_mixes": _hc_mixes,
    "hc_pre": _hc_pre,
    "hc_post": _hc_post,
    "linear plain": _linear("plain", 72),
    "linear fp8": _linear("fp8", 72),
    "linear fp4": _linear("fp4", 33),
    "linear one": _linear("plain", 1),
    "grouped_linear": _grouped_linear,
    "route_experts": _route,
    "routed_experts plain": _experts("plain"),
    "routed_experts fp4": _experts("fp4"),
    "swiglu": _swiglu,
    "dispatch_experts": _dispatch,
    "combine_experts": _combine,
    "embed_streams": _embed,
    "engram_lookup": _lookup,
    "engram_gate": _gate,
    "fake_quantize": _quantize,
    "pack_records": _quantize,
    "index_scores plain": _scores("plain"),
    "index_scores records": _scores("records"),
    "index_scores one entry a block": _scores("plain", per_block=1),
    "index_scores one head": _scores("plain", heads=1),
    "index_scores six heads": _scores("plain", heads=6),
    "select_entries": _select,
    "select_candidate_blocks": _candidates,
    "sample_tokens": _sample,
    "token_logprobs": _logprobs,
    "constrain_logits": _constrain,
    "penalize_logits": _penalize,
    "top_logprobs": _top_logprobs,
}


def test_every_op_is_covered():
    assert {name.split()[0] for name in ROW_CASES} | STEP_OPS | MOVERS == set(OPS)


def subsets(num_rows):
    """Return (rows, padded rows): one row, odd sizes, other orders, repetitions."""
    if num_rows < 8:
        return [([0], 0), ([2, 1], 1), (list(range(num_rows))[::-1], 3)]
    shuffled = torch.randperm(num_rows).tolist()
    return [
        ([0], 0),
        ([num_rows - 1], 3),
        (shuffled[:7], 0),
        (shuffled[7:16], 7),
        (shuffled[16:49], 31),
        (list(range(num_rows))[::-1], 0),
        ([num_rows - 1] * 5 + [0, 1], 1),
    ]


def assert_same_bits(actual, expected, note):
    for a, b in zip(pytree.tree_leaves(actual), pytree.tree_leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), note


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", sorted(ROW_CASES))
def test_rows_do_not_depend_on_each_other(name, dtype):
    for num_rows in (NUM_ROWS, 5):
        rows, call = ROW_CASES[name](num_rows, dtype)
        torch.set_num_threads(1)
        whole = call(*rows)
        for threads in THREADS:
            torch.set_num_threads(threads)
            assert_same_bits(call(*rows), whole, f"{name}, all rows, {threads} threads")
            for picked, num_padded in subsets(num_rows)[::threads]:
                padded = [torch.cat((r[picked], torch.zeros_like(r[:num_padded]))) for r in rows]
                out = pytree.tree_map(lambda t, p=picked: t[: len(p)].clone(), call(*padded))
                wanted = pytree.tree_map(lambda t, p=picked: t[p], whole)
                note = f"{name}, rows {picked}, {num_padded} padded, {threads} threads"
                assert_same_bits(out, wanted, note)


SIZES = [1, 2, 3, 5, 8, 16, 24, 31, 32, 33, 48, 64, 96, 100, 128, 257, 320]
SLICES = [(0, 1), (68, 69), (3, 5), (5, 13), (7, 16), (2, 31), (4, 68)]


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("num_out", SIZES)
def test_matmul_rows(num_out, threads):
    for num_in in (1, 2, 5, 8, 31, 32, 33, 64, 100, 257, 320, 1280):
        weight, x = randn(num_out, num_in), randn(NUM_ROWS, num_in)
        torch.set_num_threads(1)
        whole = matmul_rows(x, weight)
        exact = x.double() @ weight.double().t()
        assert (whole - exact).abs().max() <= 1e-5 * num_in**0.5
        torch.set_num_threads(threads)
        assert torch.equal(matmul_rows(x, weight), whole)
        for begin, end in SLICES:
            part = matmul_rows(x[begin:end], weight)
            assert torch.equal(part, whole[begin:end]), (num_out, num_in, begin, end)


# ---- ops on whole steps --------------------------------------------------------------------------

LENGTHS = {1: 13, 2: 66, 3: 9}  # tokens of the requests
STARTS = {1: 0, 2: 3, 3: 40}  # where their chunk of the big step begins


def step_variants():
    """Yield steps that all compute the same tokens: together, apart, cut, placed and padded."""
    chunks = [Chunk(slot, STARTS[slot], LENGTHS[slot]) for slot in LENGTHS]
    yield "together", [make_step(chunks, 3)]
    yield "reversed", [make_step(chunks[::-1], 0)]
    yield "alone", [make_step([chunk]) for chunk in chunks]
    yield "alone and padded", [make_step([chunk], 17) for chunk in chunks]
    pieces = [
        Chunk(c.slot, c.start + i, min(7, c.length - i))
        for c in chunks
        for i in range(0, c.length, 7)
    ]
    yield "cut", [make_step([piece], 1) for piece in pieces]
    yield "decoded", [make_step([Chunk(c.slot, p, 1)]) for c in chunks for p in positions_of(c)]


def positions_of(chunk):
    return range(chunk.start, chunk.start + chunk.length)


def assert_variants_agree(compute):
    """compute(step) -> one output row per token; compare every token's row over all variants."""
    expected = {}
    for threads in THREADS:
        torch.set_num_threads(threads)
        for name, steps in step_variants():
            # Threads matter to steps of one token; a few of these are enough.
            for step in steps if threads == 1 else steps[-5:]:
                out = compute(step)
                for t in range(step.num_real):
                    key = int(step.slots[t]), int(step.positions[t])
                    wanted = expected.setdefault(key, out[t].clone())
                    assert torch.equal(out[t], wanted), f"{name}, {threads} threads: {key}"
    assert len(expected) == sum(LENGTHS.values())


def request_values(width, dtype=torch.float32):
    return {s: randn(STARTS[s] + LENGTHS[s], width, dtype=dtype) for s in LENGTHS}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("stored", ["plain", "records"])
@pytest.mark.parametrize(("topk", "heads"), [(0, 4), (40, 4), (41, 6)])
def test_sparse_attention_rows(dtype, stored, topk, heads):
    dim, window = 32, 24
    latents, queries = request_values(dim, dtype), request_values(heads * dim, dtype)
    cache = randn(34, 8, dim, dtype=dtype)
    if stored == "records":
        latents = {s: ops.pack_records(v, "fp8_32") for s, v in latents.items()}
        cache = ops.pack_records(cache, "fp4_16")
    table, sink = scattered_blocks(4, 11, 34), randn(heads)
    chosen = {}
    for slot in LENGTHS:
        chosen[slot] = torch.full((STARTS[slot] + LENGTHS[slot], max(topk, 1)), -1).int()
        for t in range(len(chosen[slot])):
            picked = torch.randperm(t + 1)[:topk].sort().values
            chosen[slot][t, : len(picked)] = picked.int()
    garbage = torch.tensor(0x55 if stored == "records" else 9.0)

    def compute(step):
        indices = step_values(step, chosen)
        indices[step.num_real :] = -1
        return ops.sparse_attention(
            step_values(step, queries).unflatten(1, (heads, dim)),
            step_values(step, latents),
            ring_before(step, latents, 4, window + 6, garbage),
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

    assert_variants_agree(compute)


@pytest.mark.parametrize("ratio", [2, 4])
def test_pool_groups_rows(ratio):
    raw = request_values(2 * HIDDEN)

    def compute(step):
        ring = ring_before(step, raw, 4, ratio + 5, torch.tensor(9.0))
        arguments = step.positions, step.slots, step.chunk_starts
        return ops.pool_groups(step_values(step, raw), ring, *arguments, ratio, torch.float32)

    assert_variants_agree(compute)


def test_engram_rows_rows():
    ids = {s: torch.randint(0, 999, (STARTS[s] + LENGTHS[s],)).int() for s in LENGTHS}
    multipliers, primes = torch.randint(1, 2**40, (4,)), torch.randint(50, 99, (3, 2))
    constants = multipliers, primes, torch.arange(6) * 100, torch.tensor(2)

    def compute(step):
        ring = ring_before(step, ids, 4, 9, torch.tensor(7))
        arguments = step.positions, step.slots, step.chunk_starts
        return ops.engram_rows(step_values(step, ids), ring, *arguments, *constants)

    assert_variants_agree(compute)
