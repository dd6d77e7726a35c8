"""A request's logits are the same bits however its tokens are cut, batched, placed, padded, or its
units run."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.config import SamplingParams
from runtime.scoring import score_prompt
from tests.helpers.engines import VARIANTS, make_engine, run_requests
from tests.helpers.goldens import golden_expected

CASE = "dspark"  # the smallest case with every mechanism of the text model: six layers
LENGTH = 61
MODES = [("official", "actquant"), ("reference", "kvquant"), ("reference", "noquant")]


@functools.cache
def engine_of(numerics, variant, **settings):
    return make_engine(CASE, numerics=numerics, **VARIANTS[variant], **settings)


def random_prompts(count, longest, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, 380, (n,), generator=generator).tolist() for n in lengths]


@functools.cache
def long_prompt():
    return golden_expected("text-quant")["p6.input_ids"][:LENGTH].tolist()  # same vocabulary


@pytest.mark.parametrize(("numerics", "variant"), MODES)
def test_every_cut_gives_the_same_bits(numerics, variant):
    engine = engine_of(numerics, variant)
    whole = score_prompt(engine, long_prompt())
    for cut in range(1, LENGTH):
        parts = score_prompt(engine, long_prompt(), chunk_sizes=[cut, LENGTH - cut])
        assert torch.equal(parts.logits, whole.logits), f"cut at {cut}"
    assert torch.equal(score_prompt(engine, long_prompt(), is_decode=True).logits, whole.logits)


@settings(max_examples=12)
@given(sizes=st.lists(st.integers(1, 25), min_size=1, max_size=12))
def test_any_chunking_gives_the_same_bits(sizes):
    engine = engine_of("official", "actquant")
    ids = (long_prompt() * 5)[: sum(sizes)]
    whole = score_prompt(engine, ids)
    assert torch.equal(score_prompt(engine, ids, chunk_sizes=sizes).logits, whole.logits)


@pytest.mark.parametrize(("numerics", "variant"), MODES[::2])
def test_batch_composition_does_not_matter(numerics, variant):
    """32 requests alone, together, reversed, and in other buckets."""
    prompts = random_prompts(32, 24)
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=3, ignore_eos=True)

    def run(max_num_seqs, max_num_batched_tokens, order):
        engine = engine_of(
            numerics,
            variant,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        return order(run_requests(engine, order(prompts), params))

    together = run(32, 256, list)
    others = {
        "reversed": run(32, 256, lambda x: x[::-1]),
        "small buckets": run(5, 23, list),
        "alone": run(1, 64, list),
    }
    for name, other in others.items():
        for i in range(32):
            same_seed = name != "reversed"  # seeds follow the order
            if same_seed:
                assert other[i][0] == together[i][0], f"{name}: tokens of request {i}"
            # Without the same draws only the first logits answer the same question.
            count = len(together[i][1]) if same_seed else 1
            assert torch.equal(other[i][1][:count], together[i][1][:count]), f"{name}: request {i}"


def test_preemption_does_not_change_tokens():
    prompts = random_prompts(8, 60, seed=3)
    params = SamplingParams(temperature=0.8, max_tokens=20, ignore_eos=True)
    calm = run_requests(engine_of("official", "actquant"), prompts, params)
    tight = make_engine(CASE, **VARIANTS["actquant"], kv_blocks=8)
    crowded = run_requests(tight, prompts, params)
    assert [tokens for tokens, _ in crowded] == [tokens for tokens, _ in calm]


def test_compiled_units_give_the_bits_of_interpreted_ones():
    prompt = long_prompt()[:33]
    for numerics, variant in (("official", "actquant"), ("reference", "noquant")):
        reference = engine_of(numerics, variant)
        compiled = make_engine(CASE, numerics=numerics, **VARIANTS[variant], kind="inductor")
        whole = score_prompt(compiled, prompt)
        assert compiled.executor.builder.counters.compiles > 0
        assert torch.equal(whole.logits, score_prompt(reference, prompt).logits)
        parts = score_prompt(compiled, prompt, chunk_sizes=[7, 26])
        assert torch.equal(parts.logits, whole.logits)


def test_padded_rows_change_nothing():
    """Rubbish in every padded row's inputs: real rows keep their bits and the caches theirs."""
    engine = engine_of("official", "actquant")
    clean = score_prompt(engine, long_prompt())
    caches = {name: cache.clone() for name, cache in engine.executor.caches.items()}
    dirty = _score_with_rubbish(engine, long_prompt())
    assert torch.equal(dirty, clean.logits)
    for name, cache in engine.executor.caches.items():
        if name.endswith(("window", "raw", "history")):  # the other run has other blocks
            assert torch.equal(cache, caches[name]), name
        if name != "cache.block_table":
            assert not cache[0].any(), f"the reserved entry of {name} was written"


def _score_with_rubbish(engine, ids):
    replay = engine.executor.replay

    def dirty_replay(captured):
        views, used = captured.inputs.views, int((captured.inputs.views["slots"] > 0).sum())
        assert used < len(views["slots"])
        views["token_ids"][used:] = 377
        views["positions"][used:] = 90
        views["chunk_starts"][used:] = 88
        views["chunk_ends"][used:] = 91
        replay(captured)

    engine.executor.replay = dirty_replay
    try:
        return score_prompt(engine, ids).logits
    finally:
        engine.executor.replay = replay
