"""Records of jobs, and the files and streams that take them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.tokenizer import Tokenizer
from runtime.config import SamplingParams
from runtime.errors import OutputExists, OutputUnwritable, PromptTooLong
from runtime.job_output import ResultWriter, result_record
from runtime.jobs import error_record, failed_job, read_jobs
from runtime.request import Request, TokenLogprob
from runtime.stops import OutputText
from tests.helpers.goldens import golden_dir

DEFAULTS = SamplingParams(max_tokens=3, temperature=0.0)


def read(tmp_path, line):
    path = tmp_path / "jobs"
    path.write_text(line)
    return list(read_jobs(defaults=DEFAULTS, input_file=str(path)))


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_dir(golden_dir("text-quant"))


def finished(tokenizer, job, output, *, index=0, reason="stop"):
    """Return a request of a job that has ended with these tokens."""
    request = Request(f"{job.job_id}#{index}", [1, 2, 3], job.params, 0, group=job.job_id)
    request.sample_index, request.finish_reason = index, reason
    request.text = OutputText(tokenizer, job.params)
    for token_id in output:
        request.output_token_ids.append(token_id)
        request.text.append(token_id)
    request.text.finish()
    return request


class TestRecords:
    def test_result(self, tokenizer, tmp_path):
        (job,) = read(tmp_path, '{"id": "x", "prompt": "a"}')
        a, b = tokenizer.encode("ab")[1:]
        assert result_record(job, [finished(tokenizer, job, [a, b])], tokenizer) == {
            "id": "x",
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "text": "ab",
            "token_ids": [a, b],
            "finish_reason": "stop",
        }

    def test_several_outputs(self, tokenizer, tmp_path):
        (job,) = read(tmp_path, '{"id": "x", "prompt": "a", "n": 2}')
        (a,), (b,) = (tokenizer.encode(text)[1:] for text in "ab")
        requests = [
            finished(tokenizer, job, [a]),
            finished(tokenizer, job, [b, b], index=1, reason="length"),
        ]
        assert result_record(job, requests, tokenizer) == {
            "id": "x",
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "choices": [
                {"index": 0, "text": "a", "token_ids": [a], "finish_reason": "stop"},
                {"index": 1, "text": "bb", "token_ids": [b, b], "finish_reason": "length"},
            ],
        }

    def test_log_probabilities(self, tokenizer, tmp_path):
        (job,) = read(tmp_path, '{"prompt": "a", "logprobs": 1, "prompt_logprobs": 0}')
        a, b = tokenizer.encode("ab")[1:]
        request = finished(tokenizer, job, [a])
        request.logprobs = [TokenLogprob(a, -1.5, 2, ((b, -0.5),))]
        request.prompt_logprobs = [None, TokenLogprob(b, -2.0, 3)]
        record = result_record(job, [request], tokenizer)
        top = {"token_id": b, "token": "b", "logprob": -0.5}
        assert record["logprobs"] == [
            {"token_id": a, "token": "a", "logprob": -1.5, "top": [top]},
        ]
        assert record["prompt_logprobs"] == [
            None,
            {"token_id": b, "token": "b", "logprob": -2.0, "top": []},
        ]

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

    def test_the_order_of_completion_stays_if_asked_for(self, tmp_path):
        path = tmp_path / "out"
        with ResultWriter(str(path), is_ordered=False) as writer:
            for index in (2, 0, 1):
                writer.write(index, {"id": str(index)})
        assert [row["id"] for row in rows(path)] == ["2", "0", "1"]

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
        writer = ResultWriter("/dev/full")  # a device of Linux
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

    def test_nothing_waits_in_the_order_of_completion(self, capfdbinary):
        with ResultWriter("-", is_ordered=False) as writer:
            writer.write(1, {"id": "b"})
            assert capfdbinary.readouterr().out == b'{"id": "b"}\n'
            assert writer.num_written == 1

    def test_what_waits_is_written_on_interruption(self, capfdbinary):
        with pytest.raises(KeyboardInterrupt), ResultWriter("-") as writer:
            writer.write(3, {"id": "d"})
            writer.write(1, {"id": "b"})
            raise KeyboardInterrupt
        assert capfdbinary.readouterr().out == b'{"id": "b"}\n{"id": "d"}\n'


def rows_of_bytes(path):
    # str.splitlines would also split at U+2028, which JSON leaves alone.
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
