"""The Python interface: streams, chat, abort, and what it refuses."""

import pytest

from runtime import LLM, SamplingParams
from runtime.errors import (
    ChatNotEncodable,
    EngineBusy,
    NoTokenLeft,
    ParamsTypeError,
    PromptTypeError,
    UnknownField,
)
from tests.helpers.chat_models import make_chat_model

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    return LLM(max_model_len=128, max_num_seqs=4)


def test_a_stream_adds_up_to_the_outputs(llm):
    prompts = ["The quick brown fox", "abc"]
    parts = {"0": ("", []), "1": ("", [])}
    reasons = {}
    for delta in llm.stream(prompts, GREEDY):
        text, ids = parts[delta.request_id]
        parts[delta.request_id] = (text + delta.text, ids + delta.token_ids)
        assert reasons.setdefault(delta.request_id, None) is None, "a delta behind the last"
        reasons[delta.request_id] = delta.finish_reason
    for output in llm.generate(prompts, GREEDY):
        assert parts[output.request_id] == (output.text, output.token_ids)
        assert reasons[output.request_id] == output.finish_reason == "length"


def test_a_closed_stream_leaves_nothing_behind(llm):
    stream = llm.stream("abc", SamplingParams(max_tokens=50))
    next(stream)
    with pytest.raises(EngineBusy):
        llm.generate("abc", GREEDY)
    stream.close()
    assert len(llm.generate("abc", GREEDY)[0].token_ids) == 6


def test_abort_ends_one_request(llm):
    requests = llm.make_requests("a", "abc", GREEDY) + llm.make_requests("b", "xyz", GREEDY)
    assert sorted(request.request_id for request in llm.run(requests)) == ["a", "b"]
    again = llm.make_requests("c", "abc", SamplingParams(max_tokens=40, ignore_eos=True))
    short = llm.make_requests("d", "abc", SamplingParams(max_tokens=2, ignore_eos=True))
    for request in llm.run(again + short):
        if request.request_id == "d":
            llm.abort("c")
    assert again[0].finish_reason == "abort"


def test_outputs_of_one_prompt_differ_and_repeat(llm):
    params = SamplingParams(n=3, seed=5, max_tokens=6, ignore_eos=True)
    (output,) = llm.generate("abc", params)
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    assert llm.generate("abc", params)[0] == output
    alone = SamplingParams(seed=5, max_tokens=6, ignore_eos=True)
    assert llm.generate("abc", alone)[0].token_ids == output.token_ids


def test_constraints_that_leave_no_token_are_an_error(llm):
    params = SamplingParams(allowed_token_ids=(50,), banned_token_ids=(50,), max_tokens=2)
    with pytest.raises(NoTokenLeft):
        llm.generate("abc", params)
    assert len(llm.generate("abc", GREEDY)[0].token_ids) == 6


@pytest.mark.parametrize("prompts", [None, 5, b"ab", [b"a"], {"prompt": "a"}, [1.5]])
def test_prompts_of_another_type(llm, prompts):
    with pytest.raises(PromptTypeError):
        llm.generate(prompts)


def test_other_wrong_arguments(llm):
    with pytest.raises(ParamsTypeError):
        llm.generate("a", [{"max_tokens": 3}])
    with pytest.raises(UnknownField, match="max_num_seqs"):
        LLM(max_num_seq=3)


def test_chat(tmp_path):
    llm = LLM(make_chat_model(tmp_path / "model"), max_model_len=256, max_num_seqs=4)
    one = [{"role": "user", "content": "hi"}]
    two = [{"role": "system", "content": "be brief"}, *one]
    (single,) = llm.chat(one, GREEDY)
    many = llm.chat([one, two], GREEDY)
    assert many[0].output.token_ids == single.output.token_ids
    assert len(many[1].output.prompt_token_ids) > len(single.output.prompt_token_ids)
    for answer in many:
        (reply,) = answer.replies
        assert reply.finish_reason == "length"
        assert isinstance(reply.content or reply.reasoning_content, str)


def test_a_tokenizer_without_the_chat_tokens(llm):
    with pytest.raises(ChatNotEncodable):
        llm.chat([{"role": "user", "content": "hi"}])
