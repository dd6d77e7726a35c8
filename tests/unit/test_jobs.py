"""Jobs: reading every kind of line, good and bad, and writing results that survive."""

import io
import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.config import SamplingParams
from runtime.errors import (
    EmptyPrompt,
    InputUnreadable,
    NoPrompts,
    OutputExists,
    OutputUnwritable,
    PromptTooLong,
)
from runtime.jobs import (
    Job,
    LineError,
    ResultWriter,
    error_record,
    failed_job,
    read_jobs,
    result_record,
)
from runtime.request import Request

DEFAULTS = SamplingParams(max_tokens=3, temperature=0.0)


def read(tmp_path, data, *, flag="input_file"):
    path = tmp_path / "jobs"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return list(read_jobs(defaults=DEFAULTS, **{flag: str(path)}))


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


class TestRecords:
    def test_result(self):
        request = Request("x", [1, 2, 3], DEFAULTS, 0, output_token_ids=[4, 5])
        request.finish_reason = "stop"
        assert result_record(request, "text") == {
            "id": "x",
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "text": "text",
            "token_ids": [4, 5],
            "finish_reason": "stop",
        }

    def test_error_of_a_line_that_was_refused_later(self, tmp_path):
        (job,) = read(tmp_path, '{"id": "x", "prompt": "a"}')
        error = PromptTooLong(request_id="x", num_tokens=9, limit=7, max_model_len=8, reserved=1)
        record = error_record(failed_job(job, error))
        assert record["id"] == "x"
        assert record["line"] == 1
        assert record["error"]["code"] == "PromptTooLong"
        assert record["error"]["message"].startswith("request 'x': the prompt has 9 tokens")


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class TestResultFile:
    def test_a_record_is_on_disk_when_write_returns(self, tmp_path):
        path = tmp_path / "out"
        with ResultWriter(str(path)) as writer:
            writer.write(1, {"id": "b"})
            assert rows(path) == [{"id": "b"}]
            writer.write(0, {"id": "a"})
            assert rows(path) == [{"id": "b"}, {"id": "a"}]
            assert writer.num_written == 2

    @given(st.permutations(range(6)))
    def test_a_complete_file_is_in_the_order_of_the_input(self, tmp_path_factory, order):
        path = tmp_path_factory.mktemp("order") / "out"
        with ResultWriter(str(path)) as writer:
            for index in order:
                writer.write(index, {"id": str(index), "text": "x\n\u2028" * index})
        assert [row["id"] for row in rows_of_bytes(path)] == list("012345")
        assert [entry.name for entry in path.parent.iterdir()] == ["out"]

    def test_an_interruption_keeps_what_was_finished(self, tmp_path):
        path = tmp_path / "out"
        with pytest.raises(KeyboardInterrupt), ResultWriter(str(path)) as writer:
            writer.write(2, {"id": "c"})
            writer.write(0, {"id": "a"})
            raise KeyboardInterrupt
        assert rows(path) == [{"id": "c"}, {"id": "a"}]

    def test_an_existing_file_is_refused_and_kept(self, tmp_path):
        path = tmp_path / "out"
        path.write_text("old\n")
        with pytest.raises(OutputExists, match=r"has 4 bytes. Remove it, or .* --output") as caught:
            ResultWriter(str(path))
        assert caught.value.exit_code == 2
        assert path.read_text() == "old\n"

    def test_a_run_without_a_result_leaves_no_file_in_the_way(self, tmp_path):
        path = tmp_path / "out"
        with pytest.raises(KeyError), ResultWriter(str(path)):
            assert path.exists()
            raise KeyError
        assert not path.exists()

    def test_an_empty_file_may_be_used(self, tmp_path):
        path = tmp_path / "out"
        path.touch()
        with ResultWriter(str(path)) as writer:
            writer.write(0, {"id": "a"})
        assert rows(path) == [{"id": "a"}]

    @pytest.mark.parametrize("name", ["missing/out", "."])
    def test_a_place_that_cannot_be_written_fails_at_once(self, tmp_path, name):
        with pytest.raises(OutputUnwritable, match="--output"):
            ResultWriter(str(tmp_path / name))

    def test_a_device_is_written_and_left_alone(self):
        with ResultWriter("/dev/null") as writer:
            writer.write(1, {"id": "b"})
            writer.write(0, {"id": "a"})

    def test_a_full_disk_is_one_clear_error(self):
        try:
            writer = ResultWriter("/dev/full")
        except OutputUnwritable:
            pytest.skip("this system has no /dev/full")
        with pytest.raises(OutputUnwritable, match="/dev/full: No space left"):
            writer.write(0, {"id": "a"})

    def test_text_is_utf8_and_half_a_surrogate_stays_json(self, tmp_path):
        path = tmp_path / "out"
        with ResultWriter(str(path)) as writer:
            writer.write(0, {"text": "caf\u00e9"})
            writer.write(1, {"text": "\ud800"})
        assert "caf\u00e9".encode() in path.read_bytes()
        assert rows(path) == [{"text": "caf\u00e9"}, {"text": "\ud800"}]


class TestStdout:
    def test_records_come_in_the_order_of_the_input(self, capfdbinary):
        with ResultWriter(None) as writer:
            writer.write(1, {"id": "b"})
            assert capfdbinary.readouterr().out == b""
            assert writer.num_written == 0
            writer.write(0, {"id": "a"})
            assert capfdbinary.readouterr().out == b'{"id": "a"}\n{"id": "b"}\n'
            assert writer.num_written == 2

    def test_what_waits_is_written_on_interruption(self, capfdbinary):
        with pytest.raises(KeyboardInterrupt), ResultWriter("-") as writer:
            writer.write(3, {"id": "d"})
            writer.write(1, {"id": "b"})
            raise KeyboardInterrupt
        assert capfdbinary.readouterr().out == b'{"id": "b"}\n{"id": "d"}\n'


def rows_of_bytes(path):
    # str.splitlines would also split at U+2028, which JSON leaves alone.
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
