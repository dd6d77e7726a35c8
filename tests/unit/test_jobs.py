"""Jobs: reading every kind of line, good and bad."""

import gzip
import io
import json
import sys
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.config import SamplingParams
from runtime.errors import (
    EmptyPrompt,
    InputUnreadable,
    NoPrompts,
)
from runtime.job_lines import MAX_LINE_BYTES
from runtime.jobs import Job, LineError, error_record, read_jobs

DEFAULTS = SamplingParams(max_tokens=3, temperature=0.0)


def read(tmp_path, data, *, flag="input_file", has_chat=False):
    path = tmp_path / "jobs"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return list(read_jobs(defaults=DEFAULTS, has_chat=has_chat, **{flag: str(path)}))


def one_error(tmp_path, line):
    """Return the error of a bad line between two good ones, which must survive it."""
    line = line if isinstance(line, bytes) else line.encode()
    first, error, last = read(tmp_path, b'{"prompt": "a"}\n' + line + b'\n{"prompt": "b"}\n')
    assert (first.prompt, last.prompt) == ("a", "b")
    assert isinstance(error, LineError)
    assert (error.index, error.line_number) == (1, 2)
    assert "\n" not in error.message
    assert not error.message.startswith(error.code)
    return error


class TestObjects:
    def test_a_line_may_hold_text_or_ids_and_any_parameter(self, tmp_path):
        lines = [
            {"prompt": "caf\u00e9"},
            {"prompt_token_ids": [1, 2], "id": "x", "top_k": 5, "seed": 7, "stop_token_ids": [9]},
            {"id": "y", "temperature": 1, "prompt": "b", "ignore_eos": True, "max_tokens": 8},
        ]
        jobs = read(tmp_path, "\n".join(json.dumps(line, ensure_ascii=False) for line in lines))
        assert jobs == [
            Job(
                index=0,
                line_number=1,
                job_id="0",
                prompt="caf\u00e9",
                prompt_token_ids=None,
                params=DEFAULTS,
            ),
            Job(
                index=1,
                line_number=2,
                job_id="x",
                prompt=None,
                prompt_token_ids=[1, 2],
                params=SamplingParams(
                    max_tokens=3, temperature=0.0, top_k=5, seed=7, stop_token_ids=(9,)
                ),
            ),
            Job(
                index=2,
                line_number=3,
                job_id="y",
                prompt="b",
                prompt_token_ids=None,
                params=SamplingParams(max_tokens=8, temperature=1.0, ignore_eos=True),
            ),
        ]

    def test_byte_order_mark_crlf_and_blank_lines(self, tmp_path):
        data = b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \t\n{"prompt": "b"}'
        jobs = read(tmp_path, data)
        assert [(job.index, job.line_number, job.job_id, job.prompt) for job in jobs] == [
            (0, 1, "0", "a"),
            (1, 4, "3", "b"),
        ]

    def test_an_empty_file_has_no_jobs(self, tmp_path):
        assert read(tmp_path, b"") == []

    @pytest.mark.parametrize(
        ("line", "code", "text"),
        [
            ('{"prompt": "a"', "LineNotJson", "line 2: Expecting"),
            ("hello", "LineNotJson", 'such as {"prompt": "Hello"}'),
            ('{"prompt": "a"} {"prompt": "b"}', "LineNotJson", "Extra data"),
            ('{"prompt": "a", "temperature": NaN}', "LineNotJson", "NaN is no JSON number"),
            ('{"prompt": "a", "temperature": 1e999}', "FieldRangeError", "is inf"),
            ('{"prompt": "a", "prompt": "b"}', "LineNotJson", "key 'prompt' appears twice"),
            ("[" * 100_000, "LineNotJson", "line 2"),
            ('{"prompt": "a", "seed": ' + "9" * 5000 + "}", "LineNotJson", "line 2"),
            (b'{"prompt": "\xff"}', "LineNotText", "not UTF-8 at byte 12"),
            ('["a"]', "LineNotObject", "got list"),
            ("null", "LineNotObject", "got NoneType"),
            ("{}", "PromptMissing", "got neither"),
            ('{"prompt": "a", "prompt_token_ids": [1]}', "PromptMissing", "got both"),
            ('{"prompt": ["a"]}', "BadPrompt", "'prompt' must be a string of valid text"),
            ('{"prompt": null}', "BadPrompt", "got None"),
            (r'{"prompt": "\ud800"}', "BadPrompt", "valid text"),
            ('{"prompt_token_ids": "12"}', "BadPrompt", "must be a list of integers"),
            ('{"prompt_token_ids": [1, true]}', "BadPrompt", "[1, True]"),
            ('{"prompt_token_ids": [1.0]}', "BadPrompt", "[1.0]"),
            ('{"prompt": ""}', "EmptyPrompt", "request '1'"),
            ('{"prompt_token_ids": []}', "EmptyPrompt", "request '1'"),
            ('{"prompt": "a", "id": 5}', "BadId", "got 5"),
            ('{"prompt": "a", "id": ""}', "BadId", "non-empty"),
            (r'{"prompt": "a", "id": "\udfff"}', "BadId", "got '\\udfff'"),
            ('{"prompt": "a", "max_token": 5}', "UnknownField", "Did you mean max_tokens"),
            ('{"prompt": "a", "max_tokens": "5"}', "FieldTypeError", "line 2: 'max_tokens'"),
            ('{"prompt": "a", "top_p": 0}', "FieldRangeError", "greater than 0 and at most 1"),
        ],
    )
    def test_a_bad_line_in_the_middle_is_an_error_and_the_rest_runs(
        self, tmp_path, line, code, text
    ):
        error = one_error(tmp_path, line)
        assert error.code == code
        assert text in error.message
        assert error.job_id == "1"

    def test_an_error_carries_the_id_of_its_line_if_it_can_be_read(self, tmp_path):
        error = one_error(tmp_path, '{"id": "mine", "prompt": "a", "top_k": 0}')
        assert error.job_id == "mine"

    def test_the_second_use_of_an_id_is_the_error(self, tmp_path):
        data = '{"id": "x", "prompt": "a"}\n\n{"id": "x", "prompt": "b"}\n{"prompt": "c"}\n'
        first, error, last = read(tmp_path, data)
        assert (first.prompt, last.prompt) == ("a", "c")
        assert (error.code, error.line_number, error.job_id) == ("DuplicateId", 3, "x")
        assert "was used on line 1" in error.message

    def test_default_ids_take_part_in_it(self, tmp_path):
        data = '{"id": "1", "prompt": "a"}\n{"prompt": "b"}\n'
        assert [type(item) for item in read(tmp_path, data)] == [Job, LineError]

    def test_a_bad_line_does_not_use_up_its_id(self, tmp_path):
        data = '{"id": "x", "prompt": ""}\n{"id": "x", "prompt": "b"}\n'
        assert [type(item) for item in read(tmp_path, data)] == [LineError, Job]

    @given(st.lists(st.binary(max_size=30), max_size=6))
    def test_any_bytes_give_one_item_for_each_line_that_is_not_blank(self, tmp_path_factory, rows):
        data = b"\n".join(rows)
        items = read(tmp_path_factory.mktemp("any"), data)
        lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
        assert [item.line_number for item in items] == [
            number for number, line in enumerate(lines, 1) if line.strip()
        ]


CHAT = '{"messages": [{"role": "user", "content": "Hi"}]}'
BATCH = (
    '{"custom_id": "c", "method": "POST", "url": "/v1/completions", '
    '"body": {"model": "m", "prompt": "Hi"}}'
)


class TestForms:
    def test_all_forms_may_be_mixed(self, tmp_path):
        lines = ['{"prompt": "a", "id": "x"}', CHAT, BATCH, '{"prompt_token_ids": [3]}']
        text, chat, batch, ids = read(tmp_path, "\n".join(lines), has_chat=True)
        assert [job.job_id for job in (text, chat, batch, ids)] == ["x", "1", "c", "3"]
        assert chat.chat is not None and chat.prompt is None and chat.batch is None
        assert (batch.prompt, batch.batch.custom_id) == ("Hi", "c")
        assert ids.prompt_token_ids == [3]

    def test_a_chat_has_an_id_and_sampling_fields(self, tmp_path):
        line = CHAT[:-1] + ', "id": "x", "max_tokens": 9, "reasoning_effort": "low"}'
        (job,) = read(tmp_path, line, has_chat=True)
        assert (job.job_id, job.params.max_tokens, job.params.temperature) == ("x", 9, 0.0)

    @pytest.mark.parametrize(
        ("line", "code", "text"),
        [
            ('{"messages": []}', "BadChat", "line 1: Empty input messages."),
            ('{"messages": null}', "BadChat", "missing field `messages`"),
            (CHAT[:-1] + ', "max_token": 1}', "UnknownField", "Did you mean max_tokens"),
            (CHAT[:-1] + ', "prompt": "a"}', "PromptMissing", "and 'messages', got both"),
            ("{}", "PromptMissing", "'prompt', 'prompt_token_ids' and 'messages', got neither"),
            (CHAT[:-1] + ', "skip_special_tokens": false}', "ChatUnsupported", "leave it out"),
        ],
    )
    def test_a_bad_chat(self, tmp_path, line, code, text):
        (error,) = read(tmp_path, line, has_chat=True)
        assert (error.code, error.batch) == (code, None)
        assert text in error.message

    def test_ids_are_unique_over_all_forms(self, tmp_path):
        data = f'{BATCH}\n{{"id": "c", "prompt": "a"}}\n{BATCH}\n'
        first, second, third = read(tmp_path, data, has_chat=True)
        assert isinstance(first, Job)
        assert (second.code, third.code) == ("DuplicateId", "DuplicateId")
        assert error_record(second)["line"] == 2
        record = error_record(third)
        assert (record["custom_id"], record["response"]) == ("c", None)
        assert record["error"]["code"] == "DuplicateId"
        assert record["error"]["line"] == 3

    def test_a_command_without_chat_has_the_simple_forms_only(self, tmp_path):
        items = read(tmp_path, f"{CHAT}\n{BATCH}\n")
        assert [item.code for item in items] == ["PromptMissing", "PromptMissing"]


class TestBytes:
    def test_gzip_is_known_by_its_first_bytes(self, tmp_path):
        data = b'\xef\xbb\xbf{"prompt": "a"}\r\n\n{"prompt": "b"}'
        jobs = read(tmp_path, gzip.compress(data))
        assert [(job.line_number, job.prompt) for job in jobs] == [(1, "a"), (3, "b")]

    def test_gzip_from_stdin(self, monkeypatch):
        data = gzip.compress(b"a\n") + gzip.compress(b"b\n")  # members follow each other
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        jobs = list(read_jobs(defaults=DEFAULTS, prompts_file="-"))
        assert [job.prompt for job in jobs] == ["a", "b"]

    @pytest.mark.parametrize(
        ("damage", "reason"),
        [
            (lambda data: data[:-12], "ended before the end-of-stream marker"),
            (lambda data: data[:40] + b"\0\0\0\0" + data[44:], "while decompressing"),
            (lambda data: data[:-8] + bytes(8), "CRC"),
            (lambda data: data[:2], "ended before"),
        ],
    )
    def test_damaged_gzip_is_an_unreadable_input(self, tmp_path, damage, reason):
        lines = "".join(f'{{"prompt": "{i * 7919}"}}\n' for i in range(50))
        with pytest.raises(InputUnreadable, match="--input") as caught:
            read(tmp_path, damage(gzip.compress(lines.encode())))
        assert reason in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_too_long_a_line_is_an_error_and_never_in_memory(self, tmp_path):
        path = tmp_path / "jobs"
        with path.open("wb") as file:
            file.write(b'{"prompt": "a"}\n{"prompt": "')
            for _ in range(50):
                file.write(b"x" * 2**20)
            file.write(b'"}\n{"prompt": "b"}\n')
        tracemalloc.start()
        first, error, last = read_jobs(defaults=DEFAULTS, input_file=str(path))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert (first.prompt, last.prompt) == ("a", "b")
        assert (error.code, error.line_number, error.job_id) == ("LineTooLong", 2, "1")
        assert f"{50 * 2**20 + 14} bytes, the limit is {MAX_LINE_BYTES}" in error.message
        assert peak < 3 * MAX_LINE_BYTES

    @pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
    def test_the_limit_itself_is_fine(self, tmp_path, monkeypatch, end):
        monkeypatch.setattr("runtime.job_lines.MAX_LINE_BYTES", 100)
        line = b'{"prompt": "' + b"x" * 86 + b'"}'
        assert len(line) == 100
        items = read(tmp_path, b"\xef\xbb\xbf" + line + end)
        assert [item.prompt for item in items] == ["x" * 86]
        (error,) = read(tmp_path, line.replace(b"x", b"xx", 1) + end)
        assert error.code == "LineTooLong"
        assert "101 bytes" in error.message


class TestTexts:
    def test_prompts_file_has_one_a_line(self, tmp_path):
        data = b'\xef\xbb\xbf one \r\n\n{"prompt": 1}\nbad \xff\nlast'
        items = read(tmp_path, data, flag="prompts_file")
        assert [item.job_id for item in items] == ["0", "2", "3", "4"]
        assert [items[place].prompt for place in (0, 1, 3)] == [" one ", '{"prompt": 1}', "last"]
        assert (items[2].code, items[2].line_number) == ("LineNotText", 4)
        assert [item.index for item in items] == [0, 1, 2, 3], "no gaps: stdout waits for each"
        assert items[0].params is DEFAULTS

    def test_prompt_flags(self):
        jobs = list(read_jobs(defaults=DEFAULTS, prompts=["a", "b\nc"]))
        assert [(job.index, job.job_id, job.prompt) for job in jobs] == [
            (0, "0", "a"),
            (1, "1", "b\nc"),
        ]

    def test_an_empty_prompt_flag_is_a_usage_error(self):
        with pytest.raises(EmptyPrompt, match="request '1'") as caught:
            read_jobs(defaults=DEFAULTS, prompts=["a", ""])
        assert caught.value.exit_code == 2

    def test_stdin(self, monkeypatch):
        stdin = io.TextIOWrapper(io.BytesIO(b"a\nb\n"))
        monkeypatch.setattr(sys, "stdin", stdin)
        jobs = list(read_jobs(defaults=DEFAULTS, prompts_file="-"))
        assert [job.prompt for job in jobs] == ["a", "b"]

    def test_exactly_one_source(self):
        with pytest.raises(NoPrompts, match="got none"):
            read_jobs(defaults=DEFAULTS)
        with pytest.raises(NoPrompts, match="got --prompt and --input"):
            read_jobs(defaults=DEFAULTS, prompts=["a"], input_file="x")

    @pytest.mark.parametrize("name", ["missing", "."])
    def test_a_file_that_cannot_be_read_fails_at_once(self, tmp_path, name):
        with pytest.raises(InputUnreadable, match="path given to --input") as caught:
            read_jobs(defaults=DEFAULTS, input_file=str(tmp_path / name))
        assert caught.value.exit_code == 2
