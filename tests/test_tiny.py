"""The whole product on the built-in checkpoint, in under 20 seconds."""

import math

import pytest
import torch

from model.layer import layer_specs
from runtime import LLM, SamplingParams
from runtime.errors import CounterMismatch
from runtime.scoring import score_prompt

PROMPT = "The quick brown fox jumps over the lazy dog"
STEP_TOKENS = 16  # so that the prompt above takes two steps
NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    """The default model with its default numerics; only the sizes of a step are small."""
    return LLM(max_model_len=256, max_num_seqs=4, max_num_batched_tokens=STEP_TOKENS)


def num_steps(num_prompt_tokens):
    """Steps of one request alone: its prompt, then one for every token but the first."""
    return math.ceil(num_prompt_tokens / STEP_TOKENS) + NUM_TOKENS - 1


@pytest.fixture(scope="module")
def greedy(llm):
    """One greedy output; its first run builds two steps, prefill and decode."""
    assert llm.config.model is None
    num_families = len({spec.name for spec in layer_specs(llm.engine.plan.model.text_config)})
    steps = num_steps(len(llm.engine.tokenizer.encode(PROMPT)))
    with llm.metrics.expect(captures=2, replays=steps, graph_misses=0):
        (output,) = llm.generate(PROMPT, GREEDY)
    # A family is traced once per step shape, whatever the number of its layers.
    assert llm.engine.executor.builder.counters.traces == 2 * (num_families + 2)
    assert llm.engine.executor.builder.counters.compiles == 0
    return output


def test_greedy(llm, greedy):
    assert len(greedy.token_ids) == NUM_TOKENS
    assert greedy.finish_reason == "length"
    assert greedy.text == llm.engine.tokenizer.decode(greedy.token_ids)
    ids = llm.engine.tokenizer.encode(PROMPT)
    assert greedy.prompt_token_ids == ids
    assert len(ids) > STEP_TOKENS
    with llm.metrics.expect(captures=0, replays=num_steps(len(ids))):
        assert llm.generate([ids], GREEDY)[0].token_ids == greedy.token_ids


def test_an_unexpected_count_is_an_error(llm, greedy):
    with pytest.raises(CounterMismatch, match="replays"), llm.metrics.expect(replays=1):
        llm.generate(PROMPT, GREEDY)


def test_stop_token(llm, greedy):
    stop = greedy.token_ids[4]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, stop_token_ids=(stop,))
    (output,) = llm.generate(PROMPT, params)
    assert output.token_ids == greedy.token_ids[: greedy.token_ids.index(stop) + 1]
    assert output.finish_reason == "stop"


def test_sampled_alone_and_together(llm, greedy):
    """Seeds decide, not the company; prompts and outputs share steps."""

    def sampled(seed, **fields):
        return SamplingParams(seed=seed, max_tokens=5, ignore_eos=True, **fields)

    prompts = [PROMPT, "Once", PROMPT, PROMPT]
    params = [sampled(1), sampled(1, top_p=0.8), sampled(2), sampled(1)]
    mixed = llm.metrics.to_dict()["mixed_steps"]
    with llm.metrics.expect(captures=2):
        together = llm.generate(prompts, params)
    assert together[0].token_ids == together[3].token_ids != together[2].token_ids
    assert [output.request_id for output in together] == ["0", "1", "2", "3"]
    assert llm.metrics.to_dict()["mixed_steps"] > mixed
    for index in (1, 2):
        assert llm.generate(prompts[index], params[index])[0].token_ids == together[index].token_ids


def test_score_agrees_with_what_was_generated(llm, greedy):
    ids = greedy.prompt_token_ids + greedy.token_ids
    with llm.metrics.expect(captures=1, replays=math.ceil(len(ids) / STEP_TOKENS)):
        whole = score_prompt(llm.engine, ids)
    first = len(greedy.prompt_token_ids) - 1
    assert whole.logits[first:-1].argmax(-1).tolist() == greedy.token_ids
    rows = torch.log_softmax(whole.logits[:-1].double(), -1)
    wanted = rows.gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)
    assert torch.allclose(whole.logprobs.double(), wanted, rtol=0, atol=1e-5)
    pieces = score_prompt(
        llm.engine, ids, chunk_sizes=[7, 1, STEP_TOKENS, len(ids) - 8 - STEP_TOKENS]
    )
    assert torch.equal(pieces.logits, whole.logits)


def test_nothing_is_held_when_idle(llm, greedy):
    engine = llm.engine
    engine.blocks.check_idle()
    engine.slots.check_idle()
    assert not engine.scheduler.has_work
    for name, cache in engine.executor.caches.items():
        if name != "cache.block_table":
            assert not cache[0].any(), f"the reserved entry of {name} was written"
    record = llm.metrics.to_dict()
    assert record["requests"]["failed"] == record["preemptions"] == 0
    assert record["output_tokens"] >= NUM_TOKENS
