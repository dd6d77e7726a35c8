"""Lines of OpenAI's batch files, good and bad, and responses that OpenAI's own types accept."""

import json

import pytest
from openai.types import Completion
from openai.types.batch_error import BatchError
from openai.types.chat import ChatCompletion

from model.tokenizer import Tokenizer
from runtime.chat import ChatFormat
from runtime.config import INT32_MAX, SamplingParams
from runtime.job_output import result_record
from runtime.jobs import Job, LineError, error_record, read_jobs
from runtime.openai_batch import CHAT_URL, COMPLETIONS_URL
from runtime.request import Request, TokenLogprob
from runtime.stops import OutputText
from tests.helpers.chat_models import EOS, make_chat_model

USER = {"role": "user", "content": "Hi"}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
DEFAULTS = SamplingParams(temperature=0.5)


def chat_line(custom_id="c", **body):
    body = {"model": "m", "messages": [USER], **body}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT_URL, "body": body}


def completion_line(custom_id="c", **body):
    body = {"model": "m", "prompt": "Hi", **body}
    return {"custom_id": custom_id, "method": "POST", "url": COMPLETIONS_URL, "body": body}


@pytest.fixture
def read(tmp_path):
    """A function that reads one line, an object or its text."""

    def read_one(line, defaults=DEFAULTS):
        path = tmp_path / "jobs"
        path.write_text(line if isinstance(line, str) else json.dumps(line))
        (item,) = read_jobs(defaults=defaults, input_file=str(path), has_chat=True)
        return item

    return read_one


class TestGoodLines:
    def test_names_of_the_api_become_sampling_parameters(self, read):
        job = read(
            chat_line(
                max_completion_tokens=7,
                logprobs=True,
                top_logprobs=3,
                stop="x",
                n=2,
                seed=5,
                presence_penalty=0.5,
                logit_bias={"7": -1, "3": 2},
                top_p=None,
            )
        )
        assert job.params == SamplingParams(
            temperature=0.5,
            max_tokens=7,
            logprobs=3,
            stop=("x",),
            n=2,
            seed=5,
            presence_penalty=0.5,
            logit_bias=((3, 2.0), (7, -1.0)),
        )
        assert (job.job_id, job.batch.model, job.batch.url) == ("c", "m", CHAT_URL)
        assert read(chat_line(logprobs=True)).params.logprobs == 0
        assert read(chat_line(logprobs=False)).params.logprobs is None
        assert read(completion_line(logprobs=2, stop=["a", "b"])).params.logprobs == 2

    def test_a_chat_without_a_limit_runs_to_the_end_of_the_context(self, read):
        assert read(chat_line()).params.max_tokens == INT32_MAX
        assert read(chat_line(), SamplingParams(max_tokens=9)).params.max_tokens == 9
        assert read(completion_line()).params.max_tokens == 16

    def test_both_names_of_the_limit_may_agree(self, read):
        assert read(chat_line(max_tokens=5, max_completion_tokens=5)).params.max_tokens == 5

    def test_settings_of_ours_may_stand_in_a_body(self, read):
        params = read(completion_line(top_k=5, min_p=0.1, ignore_eos=True)).params
        assert (params.top_k, params.min_p, params.ignore_eos) == (5, 0.1, True)

    @pytest.mark.parametrize(
        "field",
        [
            {"user": "u"},
            {"metadata": {"a": "b"}},
            {"store": True},
            {"service_tier": "flex"},
            {"stream": False},
            {"stream": None},
            {"stop": None},
        ],
    )
    def test_what_changes_nothing_passes(self, read, field):
        assert isinstance(read(chat_line(**field)), Job)
        assert isinstance(read(completion_line(**field)), Job)

    @pytest.mark.parametrize(
        "field",
        [
            {"response_format": {"type": "text"}},
            {"parallel_tool_calls": True},
            {"tools": TOOLS},
            {"tools": TOOLS, "tool_choice": "auto"},
            {"tools": TOOLS, "tool_choice": "none"},
            {"thinking": {"type": "disabled"}},
            {"reasoning_effort": "low"},
        ],
    )
    def test_fields_of_chats(self, read, field):
        assert isinstance(read(chat_line(**field)), Job)

    def test_forms_of_a_completion_prompt(self, read):
        assert read(completion_line(prompt=["Hi"])).prompt == "Hi"
        assert read(completion_line(prompt=[3, 4])).prompt_token_ids == [3, 4]
        assert read(completion_line(prompt=[[3, 4]])).prompt_token_ids == [3, 4]
        assert isinstance(read(completion_line(echo=False, best_of=2, n=2)), Job)


def without(name):
    line = chat_line()
    del line[name]
    return line


def with_key(name, value):
    return {**chat_line(), name: value}


class TestBadLines:
    @pytest.mark.parametrize(
        ("line", "code", "text"),
        [
            (without("custom_id"), "BadBatchField", "'custom_id' must be a non-empty string"),
            (with_key("custom_id", 5), "BadBatchField", "got 5"),
            (with_key("custom_id", ""), "BadBatchField", "'custom_id'"),
            (json.dumps(with_key("custom_id", "\ud800")), "BadBatchField", "'custom_id'"),
            (with_key("method", "GET"), "BadBatchField", "must be 'POST', got 'GET'"),
            (with_key("url", "/v1/embeddings"), "BadBatchField", "got '/v1/embeddings'"),
            (with_key("url", ["x"]), "BadBatchField", "'url'"),
            (without("body"), "BadBatchField", "'body' must be an object, got None"),
            (with_key("body", []), "BadBatchField", "'body'"),
            (with_key("extra", 1), "UnknownField", "nothing is named 'extra'"),
            (with_key("prompt", "a"), "UnknownField", "'prompt'"),
            (chat_line(model=None), "BadBatchField", "'body.model'"),
            (chat_line(max_token=5), "UnknownField", "Did you mean max_tokens"),
            (chat_line(prompt="a"), "UnknownField", "nothing is named 'prompt'"),
            (completion_line(messages=[USER]), "UnknownField", "nothing is named 'messages'"),
            (chat_line(stream=True), "BatchFieldUnsupported", "a batch has no streams"),
            (chat_line(stream=0), "BatchFieldUnsupported", "'stream' of the body is 0"),
            (
                chat_line(response_format={"type": "json_object"}),
                "BatchFieldUnsupported",
                "not supported yet",
            ),
            (completion_line(echo=True), "BatchFieldUnsupported", "not supported yet"),
            (completion_line(best_of=2), "BatchFieldUnsupported", "only the value of n"),
            (completion_line(prompt=["a", "b"]), "BatchFieldUnsupported", "one prompt"),
            (chat_line(n="2"), "FieldTypeError", "line 1, body: 'n' must be an integer"),
            (chat_line(n=0), "FieldRangeError", "from 1 to 128"),
            (chat_line(max_tokens="5"), "FieldTypeError", "'max_tokens' must be an integer"),
            (chat_line(max_tokens=0), "FieldRangeError", "'max_tokens' is 0"),
            (chat_line(max_completion_tokens=0), "FieldRangeError", "'max_tokens' is 0"),
            (chat_line(max_completion_tokens="5"), "FieldTypeError", "must be an integer"),
            (
                chat_line(max_tokens=4, max_completion_tokens=5),
                "BadBatchField",
                "'body.max_completion_tokens' must be the same as max_tokens, 4, got 5",
            ),
            (chat_line(stop=["x"] * 17), "FieldRangeError", "at most 16 entries, not 17"),
            (chat_line(stop=[""]), "FieldRangeError", "'stop'"),
            (chat_line(logprobs=2), "BadBatchField", "must be true or false, got 2"),
            (chat_line(top_logprobs=2), "BadBatchField", "beside logprobs true"),
            (chat_line(logprobs=True, top_logprobs="2"), "BadBatchField", "top_logprobs"),
            (chat_line(logprobs=True, top_logprobs=21), "FieldRangeError", "from 0 to 20"),
            (chat_line(logit_bias={"-1": 1}), "FieldTypeError", "'logit_bias'"),
            (chat_line(logit_bias={"99999999999": 1}), "FieldTypeError", "'logit_bias'"),
            (chat_line(logit_bias={"5": 101}), "FieldRangeError", "from -100 to 100"),
            (chat_line(temperature=-1), "FieldRangeError", "'temperature'"),
            (chat_line(skip_special_tokens=False), "ChatUnsupported", "skip_special_tokens"),
            (chat_line(messages=[]), "BadChat", "line 1, body: Empty input messages"),
            (chat_line(messages=None), "BadChat", "missing field `messages`"),
            (chat_line(messages=[{**USER, "content": None}]), "BadChat", "content should be"),
            (chat_line(messages=[{**USER, "role": "wizard"}]), "BadChat", "`wizard`"),
            (
                json.dumps(chat_line(messages=[{**USER, "content": "\ud800"}])),
                "BadChat",
                "surrogate",
            ),
            (chat_line(tools=TOOLS, tool_choice="required"), "ChatUnsupported", "'required'"),
            (
                chat_line(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
                "BadChat",
                "image_url",
            ),
            (completion_line(prompt=None), "BadPrompt", "'body.prompt'"),
            (completion_line(prompt=""), "EmptyPrompt", "request 'c'"),
            (completion_line(prompt=[]), "EmptyPrompt", "request 'c'"),
            (completion_line(prompt=[1, True]), "BadPrompt", "token ids"),
            (json.dumps(completion_line(prompt="\ud800")), "BadPrompt", "valid text"),
        ],
    )
    def test_each_is_one_clear_record(self, read, line, code, text):
        error = read(line)
        assert isinstance(error, LineError)
        assert error.code == code
        assert text in error.message
        record = error_record(error)
        assert set(record) == {"id", "custom_id", "response", "error"}
        assert record["id"].startswith("batch_req_")
        assert record["custom_id"] in ("c", None)
        assert record["response"] is None
        assert BatchError.model_validate(record["error"]).line == 1
        assert "\n" not in record["error"]["message"]

    def test_a_chat_without_messages(self, read):
        line = chat_line()
        del line["body"]["messages"]
        assert read(line).code == "BadChat"

    def test_an_image_is_refused_and_not_fetched(self, read):
        part = {"type": "image_url", "image_url": {"url": "http://localhost:9/x.png"}}
        error = read(chat_line(messages=[{"role": "user", "content": [part]}]))
        assert error.code == "ChatUnsupported"
        assert "an image is not supported yet" in error.message

    def test_nested_too_deeply(self, read):
        """Also where the parser of JSON just manages what the next step does not."""
        for depth in (200, 5000, *range(880, 1000, 3)):
            schema = '{"a": ' * depth + "1" + "}" * depth
            tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {schema}}}}}'
            line = json.dumps(chat_line()).replace('"model"', f'"tools": [{tool}], "model"')
            assert read(line).code in ("BadChat", "LineNotJson")
            prompt = f'{{"prompt": {"[" * depth}{"]" * depth}}}'
            assert read(prompt).code in ("BadPrompt", "LineNotJson")

    def test_a_number_that_json_holds_and_the_library_does_not(self, read):
        function = {"name": "f", "parameters": {"maximum": 10**30}}
        assert read(chat_line(tools=[{"type": "function", "function": function}])).code == "BadChat"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.from_dir(make_chat_model(tmp_path_factory.mktemp("chat") / "model"))


@pytest.fixture(scope="module")
def chat_format(tokenizer):
    return ChatFormat(tokenizer, EOS)


@pytest.fixture
def respond(read, tokenizer, chat_format):
    """A function that answers a line with scripted outputs and returns the output line."""

    def answer(line, *outputs):
        job = read(line)
        requests = []
        for index, (output, reason) in enumerate(outputs):
            request = Request(f"c#{index}", [5, 6, 7], job.params, 0, group="c")
            request.sample_index, request.finish_reason = index, reason
            request.text = OutputText(tokenizer, job.params)
            if job.chat is not None:
                request.text = chat_format.output_text(job.chat, job.params)
            for token_id in tokenizer.encode(output)[1:]:
                request.output_token_ids.append(token_id)
                if request.text.append(token_id):
                    break
            request.text.finish()
            if job.params.logprobs is not None:
                request.logprobs = [
                    TokenLogprob(i, -0.5, 1, ((i, -0.5), (70, -2.0))[: job.params.logprobs])
                    for i in request.output_token_ids
                ]
            requests.append(request)
        record = result_record(job, requests, tokenizer, chat_format)
        return json.loads(json.dumps(record, allow_nan=False))

    return answer


END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
CALL = (
    "\n\n<\uff5cDSML\uff5c calls>\n"
    '<\uff5cDSML\uff5c invoke name="look">\n'
    '<\uff5cDSML\uff5c parameter name="at" string="true">it</\uff5cDSML\uff5c parameter>\n'
    "</\uff5cDSML\uff5c invoke>\n</\uff5cDSML\uff5c calls>"
)


def body_of(record, cls):
    """Check the shape of an output line and return its body as OpenAI's type."""
    assert set(record) == {"id", "custom_id", "response", "error"}
    assert (record["custom_id"], record["error"]) == ("c", None)
    response = record["response"]
    assert set(response) == {"status_code", "request_id", "body"}
    assert response["status_code"] == 200
    digest = record["id"].removeprefix("batch_req_")
    assert len(digest) == 24
    assert response["request_id"] == f"req_{digest}"
    body = cls.model_validate(response["body"])
    assert body.id.endswith(f"-{digest}")
    assert (body.model, body.created) == ("m", 0)
    usage = body.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    return body


class TestResponses:
    def test_a_chat(self, respond, tokenizer):
        body = body_of(respond(chat_line(), (f"So</think>Yes{END}", "stop")), ChatCompletion)
        assert body.object == "chat.completion"
        (choice,) = body.choices
        assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
        assert (choice.message.role, choice.message.content) == ("assistant", "Yes")
        assert choice.message.reasoning_content == "So"
        assert choice.message.tool_calls is None
        num_thought = len(tokenizer.encode("So")) - 1
        num_said = len(tokenizer.encode("Yes")) - 1
        assert body.usage.prompt_tokens == 3
        assert body.usage.completion_tokens == num_thought + num_said + 2
        assert body.usage.completion_tokens_details.reasoning_tokens == num_thought

    def test_tool_calls(self, respond):
        output = (f"So</think>Wait.{CALL}{END}", "stop")
        record = respond(chat_line(tools=TOOLS), output)
        (choice,) = body_of(record, ChatCompletion).choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Wait."
        (call,) = choice.message.tool_calls
        assert (call.type, call.function.name) == ("function", "look")
        assert json.loads(call.function.arguments) == {"at": "it"}
        assert call.id == f"call_{record['id'].removeprefix('batch_req_')}_0_0"
        assert record == respond(chat_line(tools=TOOLS), output)

    def test_a_call_alone_has_no_content(self, respond):
        line = chat_line(tools=TOOLS, thinking={"type": "disabled"})
        (choice,) = body_of(respond(line, (CALL + END, "stop")), ChatCompletion).choices
        assert choice.message.content is None
        assert "reasoning_content" not in choice.message.model_extra

    def test_without_tools_a_call_is_text(self, respond):
        line = chat_line(thinking={"type": "disabled"})
        (choice,) = body_of(respond(line, (CALL + END, "stop")), ChatCompletion).choices
        assert choice.finish_reason == "stop"
        assert choice.message.content == CALL.lstrip("\n")

    def test_a_reply_that_was_cut(self, respond):
        (choice,) = body_of(respond(chat_line(), ("So", "length")), ChatCompletion).choices
        assert (choice.finish_reason, choice.message.content) == ("length", "")
        assert choice.message.reasoning_content == "So"

    def test_several_choices(self, respond):
        line = chat_line(n=2, thinking={"type": "disabled"})
        body = body_of(respond(line, ("One" + END, "stop"), ("Two", "length")), ChatCompletion)
        assert [(c.index, c.message.content, c.finish_reason) for c in body.choices] == [
            (0, "One", "stop"),
            (1, "Two", "length"),
        ]

    def test_log_probabilities_of_a_chat(self, respond, tokenizer):
        line = chat_line(logprobs=True, top_logprobs=2)
        body = body_of(respond(line, (f"So</think>Yes{END}", "stop")), ChatCompletion)
        logprobs = body.choices[0].logprobs
        assert "".join(entry.token for entry in logprobs.content) == "Yes"
        assert [len(entry.top_logprobs) for entry in logprobs.content] == [2] * len(
            logprobs.content
        )
        assert logprobs.content[0].logprob == -0.5
        assert bytes(logprobs.content[0].bytes).decode() == logprobs.content[0].token
        thought = logprobs.model_extra["reasoning_content"]
        assert "".join(entry["token"] for entry in thought) == "So"
        alone = respond(chat_line(logprobs=True), ("So", "length"))
        assert body_of(alone, ChatCompletion).choices[0].logprobs.content == []

    def test_a_stop_string_cuts_text_and_log_probabilities(self, respond):
        """It is searched in the answer, not in the reasoning."""
        line = chat_line(stop=["es"], logprobs=True)
        (choice,) = body_of(
            respond(line, (f"Yes, so</think>No. Yes, I{END}", "stop")), ChatCompletion
        ).choices
        assert choice.message.reasoning_content == "Yes, so"
        assert choice.message.content == "No. Y"
        text = "".join(entry.token for entry in choice.logprobs.content)
        assert "No. Y".startswith(text[:4])

    def test_a_completion(self, respond, tokenizer):
        line = completion_line(logprobs=2, n=2)
        record = respond(line, ("Yes, yes", "length"), ("No" + END, "stop"))
        body = body_of(record, Completion)
        assert body.object == "text_completion"
        first, second = body.choices
        assert (first.text, first.finish_reason, first.index) == ("Yes, yes", "length", 0)
        assert (second.text, second.finish_reason, second.index) == ("No", "stop", 1)
        logprobs = first.logprobs
        assert "".join(logprobs.tokens) == "Yes, yes"
        assert set(logprobs.token_logprobs) == {-0.5}
        for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
            assert first.text[offset : offset + len(token)] == token
        assert [list(top)[0] for top in logprobs.top_logprobs] == logprobs.tokens
        assert second.logprobs.tokens[-1] == END
        num_tokens = len(tokenizer.encode("Yes, yes")) + len(tokenizer.encode("No" + END)) - 2
        assert (body.usage.prompt_tokens, body.usage.completion_tokens) == (3, num_tokens)

    def test_ids_depend_on_the_request_alone(self, respond, read):
        line = completion_line()
        record = respond(line, ("a", "length"))
        turned = dict(reversed(line.items()))
        assert respond(json.dumps(turned, indent=None), ("a", "length")) == record
        other = respond(completion_line(seed=3), ("a", "length"))
        assert other["id"] != record["id"]
        assert error_record(read(completion_line(n=0)))["id"] != record["id"]
