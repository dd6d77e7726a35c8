"""Requests: views of their tokens, prompt checks, derived seeds."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.config import SamplingParams
from runtime.errors import EmptyPrompt, ParamTokenOutOfRange, PromptTooLong, TokenOutOfRange
from runtime.request import Chunk, Request, StepPlan, check_params, check_prompt, request_seed


def make(prompt, output=(), num_computed=0):
    return Request(
        "r",
        list(prompt),
        SamplingParams(),
        seed=0,
        output_token_ids=list(output),
        num_computed=num_computed,
    )


@pytest.mark.parametrize(("num_prompt", "num_output"), [(1, 0), (1, 4), (4, 4), (5, 1)])
def test_tokens_between_is_a_slice_of_all_tokens(num_prompt, num_output):
    request = make(range(num_prompt), range(100, 100 + num_output))
    assert request.num_tokens == len(request.token_ids) == num_prompt + num_output
    for start in range(request.num_tokens + 1):
        for end in range(start, request.num_tokens + 1):
            assert request.tokens_between(start, end) == request.token_ids[start:end]


def test_a_request_decodes_once_only_its_last_sample_is_missing():
    assert not make([1], [], 0).is_decoding  # one token is missing, but of the prompt
    assert make([1, 2], [3], 2).is_decoding
    assert not make([1, 2], [3], 0).is_decoding  # after a preemption
    assert make([1, 2], [3], 1).num_remaining == 2


def test_chunks_and_plans_know_their_tokens_and_samples():
    first, second = make([1, 2, 3]), make([4, 5], [6], 2)
    chunks = (Chunk(second, 2, 1, True), Chunk(first, 0, 2, False))
    plan = StepPlan(chunks, 3, 1, 2, 1)
    assert [chunk.token_ids for chunk in plan.chunks] == [[6], [1, 2]]
    assert [chunk.end for chunk in plan.chunks] == [3, 2]
    assert plan.sampled_requests == [second]


def test_outputs_are_not_shared_between_requests():
    first, second = (Request(name, [1], SamplingParams(), 0) for name in "ab")
    first.output_token_ids.append(5)
    first.block_ids.append(5)
    assert second.output_token_ids == second.block_ids == []


def test_a_request_is_a_group_of_its_own_unless_it_has_one():
    assert make([1]).group == "r"
    assert (make([1]).sample_index, make([1]).logprobs, make([1]).prompt_logprobs) == (
        0,
        None,
        None,
    )
    assert Request("r#1", [1], SamplingParams(), 0, group="r", sample_index=1).group == "r"


class TestCheckPrompt:
    def test_a_prompt_may_leave_room_for_just_one_token(self):
        check_prompt("r", [0, 9, 5], vocab_size=10, max_model_len=4)
        with pytest.raises(PromptTooLong, match=r"'r'.* 4 tokens, the limit is 3"):
            check_prompt("r", [0, 9, 5, 5], vocab_size=10, max_model_len=4)

    def test_empty(self):
        with pytest.raises(EmptyPrompt, match="request 'r'"):
            check_prompt("r", [], vocab_size=10, max_model_len=4)

    @pytest.mark.parametrize("wrong", [-1, 10, 2**40])
    def test_token_out_of_range_is_named_with_its_place(self, wrong):
        with pytest.raises(TokenOutOfRange, match=f"token 1 of the prompt is {wrong}, .* < 10"):
            check_prompt("r", [3, wrong], vocab_size=10, max_model_len=4)


class TestCheckParams:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("logit_bias", {3: 1, 10: 1}),
            ("allowed_token_ids", [3, 10]),
            ("banned_token_ids", [10]),
            ("stop_token_ids", [2**31 - 1, 10]),
        ],
    )
    def test_ids_are_those_of_the_vocabulary(self, field, value):
        params = SamplingParams(**{field: value})
        check_params("r", params, vocab_size=2**31)
        with pytest.raises(ParamTokenOutOfRange, match=f"'r': '{field}' names token .* < 10"):
            check_params("r", params, vocab_size=10)

    def test_the_last_id_is_one(self):
        check_params("r", SamplingParams(stop_token_ids=[9], logit_bias={0: 1}), vocab_size=10)


class TestSeed:
    def test_known_values(self):
        # Frozen: changing the derivation changes the outputs of every job without explicit seeds.
        assert request_seed(0, "0", [0, 1, 2]) == 5024019124316839998
        assert request_seed(7, "caf\u00e9", []) == -1580766549119627938

    @given(st.integers(0, 2**63 - 1), st.text(), st.lists(st.integers(0, 2**31), max_size=5))
    def test_fits_int64(self, engine_seed, request_id, prompt):
        assert -(2**63) <= request_seed(engine_seed, request_id, prompt) < 2**63

    def test_every_part_counts(self):
        seeds = {
            request_seed(0, "a", [1, 2]),
            request_seed(1, "a", [1, 2]),
            request_seed(0, "b", [1, 2]),
            request_seed(0, "a", [2, 1]),
            request_seed(0, "a", [1]),
            request_seed(0, "a", []),
            request_seed(0, "", [1, 2]),
        }
        assert len(seeds) == 7

    def test_is_the_same_in_another_process(self):
        code = "from runtime.request import request_seed; print(request_seed(3, 'x', [4, 5]))"
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert int(run.stdout) == request_seed(3, "x", [4, 5])
