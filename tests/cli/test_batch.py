"""`python -m runtime.offline` over batch files: mixed forms, chats, errors, checks and plans."""

import contextlib
import gzip
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from huggingface_hub import constants
from openai.types import Completion
from openai.types.batch_error import BatchError
from openai.types.chat import ChatCompletion

from runtime import cli, offline
from tests.helpers.chat_models import make_chat_model
from tests.helpers.goldens import golden_dir
from tests.helpers.hub import NAME, lay_out_cache

ROOT = Path(__file__).resolve().parents[2]
LIMITS = ["--max-model-len", "128", "--block-size", "16", "--max-num-seqs", "16"]
NUM_GOOD, NUM_LINES = 180, 200
OFF = {"thinking": {"type": "disabled"}}


def user(content):
    return [{"role": "user", "content": content}]


def batch_line(custom_id, url, **body):
    body = {"model": "any", **body}
    return {"custom_id": custom_id, "method": "POST", "url": f"/v1/{url}", "body": body}


def chat_line(custom_id, **body):
    return batch_line(custom_id, "chat/completions", **{"max_tokens": 3, **OFF, **body})


def good_line(index):
    """Return the line of a place: five forms in turn, parameters mixed."""
    varied = {"temperature": (0, 0.7, 1.3)[index % 3], "n": 1 + (index % 7 == 0)}
    match index % 5:
        case 0:
            return {"prompt": f"Number {index}", "max_tokens": 3, **varied}
        case 1:
            return {"messages": user(f"Hi {index}"), "max_tokens": 3, **OFF, **varied}
        case 2:
            logprobs = {"logprobs": True, "top_logprobs": 2} if index % 2 else {}
            return chat_line(f"chat {index}", messages=user("Hi"), **varied, **logprobs)
        case 3:
            extra = {"logprobs": 1} if index % 2 else {"stop": ["e", "a"], "user": "u"}
            return batch_line(
                f"text {index}", "completions", prompt="Once", max_tokens=4, **varied, **extra
            )
    return {"id": f"ids {index}", "prompt_token_ids": [3 + index, 4], "max_tokens": 2, **varied}


# Every kind of bad line that a batch file may have, with the code of its record.
BAD = [
    (chat_line("chat 2", messages=user("again")), "DuplicateId"),
    (chat_line("field", messages=user("a"), max_token=3), "UnknownField"),
    (chat_line("n", messages=user("a"), n="2"), "FieldTypeError"),
    (chat_line("tokens", messages=user("a"), max_tokens="2"), "FieldTypeError"),
    (chat_line("null", messages=user(None)), "BadChat"),
    (chat_line("none", messages=[]), "BadChat"),
    (chat_line("role", messages=[{"role": "wizard", "content": "a"}]), "BadChat"),
    (batch_line("url", "embeddings", input="a"), "BadBatchField"),
    (b'{"prompt": "' + b"x" * (50 * 2**20) + b'"}', "LineTooLong"),
    (b'{"prompt": "\xff\xfe"}', "LineNotText"),
    (chat_line("half", messages=user("\ud800")), "BadChat"),
    (chat_line("bias", messages=user("a"), logit_bias={"384": 1}), "ParamTokenOutOfRange"),
    (chat_line("stops", messages=user("a"), stop=["x"] * 17), "FieldRangeError"),
    (chat_line("zero", messages=user("a"), max_tokens=0), "FieldRangeError"),
    (chat_line("long", messages=user("a" * 200)), "PromptTooLong"),
    (b'{"custom_id": "broken', "LineNotJson"),
    (chat_line("stream", messages=user("a"), stream=True), "BatchFieldUnsupported"),
    (
        batch_line("format", "completions", prompt="a", response_format={"type": "text"}),
        "UnknownField",
    ),
    (
        {"id": "nothing", "prompt": "a", "allowed_token_ids": [5], "banned_token_ids": [5]},
        "NoTokenLeft",
    ),
    ({"id": "both", "prompt": "a", "messages": user("a")}, "PromptMissing"),
]


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


def run(*argv):
    """Run the command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.run_main(offline.main, [str(word) for word in argv])
    return Outcome(code, out.getvalue(), err.getvalue())


def write_lines(path, lines, end=b"\n"):
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\xef\xbb\xbf" + end.join(raw) + end)
    return path


def records(text):
    return [json.loads(line) for line in text.splitlines()]


def id_of(record):
    return record.get("custom_id") or record["id"]


def is_error(record):
    return record.get("error") is not None


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_chat_model(tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture(scope="module")
def job(model, tmp_path_factory):
    """A batch of 200 lines, 20 of them bad: its folder, lines and outcome."""
    folder = tmp_path_factory.mktemp("job")
    lines = [(good_line(index), None) for index in range(NUM_GOOD)]
    places = random.Random(1).sample(range(10, NUM_LINES), len(BAD))
    for place, bad in zip(sorted(places), BAD, strict=True):
        lines.insert(place, bad)
    write_lines(folder / "in.jsonl", [line for line, _ in lines], b"\r\n\r\n")
    output = ["--output", folder / "out.jsonl", "--json", folder / "summary.json"]
    flags = ["--model", model, *LIMITS, "--input", folder / "in.jsonl"]
    return folder, lines, run(*flags, *output)


class TestMixedFile:
    def test_every_line_has_its_record_in_order(self, job):
        folder, lines, outcome = job
        assert (outcome.code, outcome.out) == (0, ""), outcome.err
        got = records((folder / "out.jsonl").read_text())
        assert len(got) == len(lines) == NUM_LINES
        for place, ((line, code), record) in enumerate(zip(lines, got, strict=True)):
            own = line if isinstance(line, dict) else {}
            assert id_of(record) == own.get("custom_id", own.get("id", str(2 * place)))
            assert (record["error"]["code"] if is_error(record) else None) == code
        assert outcome.err.splitlines()[-1] == f"{len(BAD)} lines failed"

    def test_batch_lines_have_the_shapes_of_openai(self, job):
        got = records((job[0] / "out.jsonl").read_text())
        batch = [record for record in got if "custom_id" in record]
        assert len({record["id"] for record in batch}) == len(batch) > 80
        for record in batch:
            assert set(record) == {"id", "custom_id", "response", "error"}
            if is_error(record):
                assert record["response"] is None
                BatchError.model_validate(record["error"])
                continue
            body = record["response"]["body"]
            cls = Completion if record["custom_id"].startswith("text") else ChatCompletion
            parsed = cls.model_validate(body)
            assert (parsed.model, parsed.created) == ("any", 0)
            number = int(record["custom_id"].split()[1])
            assert len(parsed.choices) == 1 + (number % 7 == 0)
            assert all(c.finish_reason in ("stop", "length") for c in parsed.choices)
            assert parsed.usage.completion_tokens <= 4 * len(parsed.choices)

    def test_simple_forms_keep_theirs(self, job):
        got = {id_of(record): record for record in records((job[0] / "out.jsonl").read_text())}
        assert set(got["ids 4"]) == {
            *("id", "prompt_tokens", "completion_tokens", "text", "token_ids", "finish_reason")
        }
        several = got["ids 14"]
        assert set(several) == {"id", "prompt_tokens", "completion_tokens", "choices"}
        assert [choice["index"] for choice in several["choices"]] == [0, 1]
        chat = next(record for record in got.values() if "message" in record)
        assert chat["message"]["role"] == "assistant"
        assert "text" not in chat

    def test_counts_of_the_report(self, job):
        folder, lines, _ = job
        results = json.loads((folder / "summary.json").read_text())["results"]
        num_requests = sum(
            (line if "custom_id" not in line else line["body"]).get("n", 1)
            for line, code in lines
            if code is None
        )
        # The line that no token is left for did run, and ended as failed.
        assert results["requests"] == {"finished": num_requests + 1, "failed": len(BAD)}

    def test_the_same_file_twice_from_a_pipe_unsorted(self, job, model):
        """Packed, from stdin, in another batch composition: the same lines in some order."""
        folder, _, _ = job
        flags = ["--model", model, *LIMITS[:-1], "5", "--input", "-", "--output-order"]
        words, environment = command(*flags, "completion", "--quiet")
        done = subprocess.run(
            words,
            env=environment,
            input=gzip.compress((folder / "in.jsonl").read_bytes(), 1),
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        first = (folder / "out.jsonl").read_bytes().splitlines()
        got = done.stdout.splitlines()
        assert got != first
        assert sorted(got) == sorted(first)


class TestValidate:
    def test_bad_lines_without_a_model(self, job):
        folder, _, _ = job
        outcome = run("--input", folder / "in.jsonl", "--validate", "--model", "no/such/model/at")
        assert outcome.code == 1
        needs_model = {"ParamTokenOutOfRange", "PromptTooLong", "NoTokenLeft"}
        expected = [code for _, code in BAD if code not in needs_model]
        assert [record["error"]["code"] for record in records(outcome.out)] == expected
        assert outcome.err.splitlines() == [
            f"{NUM_LINES} lines read",
            f"{len(expected)} lines failed",
        ]

    def test_a_good_file_and_a_report(self, tmp_path):
        lines = write_lines(tmp_path / "j", [good_line(index) for index in range(20)])
        outcome = run(
            *("--input", lines, "--validate", "--output", tmp_path / "bad", "--json", "-")
        )
        assert outcome.code == 0
        document = json.loads(outcome.out)
        assert document["schema"] == offline.VALIDATE_SCHEMA
        assert document["results"] == {"lines": 20, "failed": 0, "codes": {}}
        assert not (tmp_path / "bad").exists()

    def test_torch_is_not_imported(self, tmp_path):
        lines = write_lines(tmp_path / "j", [good_line(index) for index in range(5)])
        code = (
            "import sys; from runtime import offline\n"
            f"code = offline.main(['--validate', '--input', {str(lines)!r}])\n"
            "sys.exit(code or 'torch' in sys.modules)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr

    @pytest.mark.benchmark
    def test_a_hundred_thousand_lines_take_seconds(self, tmp_path):
        """About 4 s on one core of a virtual machine, 2026."""
        lines = [good_line(index) for index in range(100_000)]
        path = write_lines(tmp_path / "j", lines)
        start = time.perf_counter()
        assert run("--validate", "--input", path).code == 0
        assert time.perf_counter() - start < 20


class TestPlan:
    @pytest.fixture
    def bare(self, model, tmp_path):
        """The model without its weights."""
        folder = tmp_path / "bare"
        folder.mkdir()
        for name in ("config.json", "tokenizer.json"):
            (folder / name).write_bytes((model / name).read_bytes())
        return folder

    def test_counts_without_weights(self, bare, tmp_path):
        lines = [
            {"prompt_token_ids": [3] * 10, "max_tokens": 5},
            {"prompt_token_ids": [3] * 40, "max_tokens": 200, "n": 2},
            {"prompt_token_ids": [3] * 40, "truncate_prompt_tokens": 17, "max_tokens": 1},
            {"prompt_token_ids": [3] * 128},
            {"prompt": ""},
            {"messages": user("Hi"), **OFF, "max_tokens": 1},
        ]
        flags = ["--model", bare, *LIMITS, "--input", write_lines(tmp_path / "j", lines)]
        outcome = run(*flags, "--plan", "--json", tmp_path / "plan.json")
        assert outcome.code == 0, outcome.err
        results = json.loads((tmp_path / "plan.json").read_text())["results"]
        num_chat = results["prompt_tokens"] - 10 - 2 * 40 - 17
        assert 3 <= num_chat <= 16
        assert results == {
            "lines": 6,
            "failed": 2,
            "requests": 5,
            "prompt_tokens": 107 + num_chat,
            "longest_prompt_tokens": 40,
            "max_output_tokens": 5 + 2 * 88 + 1 + 1,
            "estimated_steps": 88,
            "prompt_length_histogram": {"16": 2, "32": 1, "64": 1},
        }
        assert "prompt tokens  " in outcome.out
        assert "17 to 32             1 ####################\n" in outcome.out
        assert outcome.err.splitlines()[-1] == "2 lines failed"

    def test_the_steps_are_about_those_of_the_run(self, model, tmp_path):
        lines = [
            {"prompt_token_ids": [3] * (1 + i % 9), "max_tokens": 1 + i % 11, "ignore_eos": True}
            for i in range(40)
        ]
        limits = ["--model", model, "--max-num-seqs", "4", "--max-model-len", "128", "--quiet"]
        limits += ["--max-num-batched-tokens", "8", "--input", write_lines(tmp_path / "j", lines)]
        assert run(*limits, "--plan", "--json", tmp_path / "plan.json").code == 0
        assert run(*limits, "--output", tmp_path / "o", "--json", tmp_path / "run.json").code == 0
        estimate = json.loads((tmp_path / "plan.json").read_text())["results"]["estimated_steps"]
        steps = json.loads((tmp_path / "run.json").read_text())["results"]["steps"]
        assert 0.75 * steps <= estimate <= 1.1 * steps

    def test_a_hub_id_needs_two_files(self, bare, tmp_path, monkeypatch):
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        outcome = run("--model", NAME, "--prompt", "a", "--plan")
        assert outcome.code == 3
        assert outcome.err.startswith("NotInHubCache")
        lay_out_cache(tmp_path / "hub", bare)
        outcome = run("--model", NAME, "--prompt", "a", "--plan")
        assert outcome.code == 0, outcome.err
        assert outcome.out.startswith("lines          1, 0 of them fail\n")

    @pytest.mark.parametrize(
        ("flags", "text"),
        [
            (["--validate"], "not allowed with argument"),
            (["--output", "x"], "--plan has no results"),
        ],
    )
    def test_what_does_not_go_with_it(self, flags, text):
        outcome = run("--prompt", "a", "--plan", *flags)
        assert outcome.code == 2
        assert outcome.err.startswith("BadArguments")
        assert text in outcome.err


class TestFailures:
    def test_a_tokenizer_without_chat_tokens(self, tmp_path):
        lines = [{"messages": user("Hi")}, chat_line("c", messages=user("Hi")), {"prompt": "a"}]
        path = write_lines(tmp_path / "j", lines)
        flags = ["--model", golden_dir("text-quant"), *LIMITS, "--max-tokens", "1"]
        outcome = run(*flags, "--input", path)
        assert outcome.code == 0
        first, second, third = records(outcome.out)
        assert first["error"]["code"] == second["error"]["code"] == "ChatNotEncodable"
        assert "tokenizer.json cannot encode the chat format" in first["error"]["message"]
        assert "text" in third
        assert outcome.err.splitlines()[-1] == "2 lines failed"

    def test_several_outputs_that_never_fit_are_one_failure(self, model, tmp_path):
        lines = [
            {"prompt_token_ids": [3] * 40, "max_tokens": 30, "n": 3, "id": "big"},
            {"prompt_token_ids": [3], "max_tokens": 2, "n": 2},
        ]
        flags = ["--model", model, *LIMITS, "--kv-blocks", "4"]
        outcome = run(*flags, "--input", write_lines(tmp_path / "j", lines))
        assert outcome.code == 0
        big, small = records(outcome.out)
        assert big["error"]["code"] == "RequestNeverFits"
        assert len(small["choices"]) == 2
        assert outcome.err.splitlines()[-1] == "1 lines failed"

    def test_an_input_that_breaks_off_loses_nothing_that_was_read(self, model, tmp_path):
        rng = random.Random(2)
        lines = [
            {"prompt_token_ids": [rng.randrange(3, 384) for _ in range(30)], "max_tokens": 1}
            for _ in range(60)
        ]
        data = gzip.compress(write_lines(tmp_path / "whole", lines).read_bytes())
        (tmp_path / "j").write_bytes(data[: len(data) // 2])
        output = tmp_path / "out"
        flags = ["--model", model, *LIMITS, "--quiet", "--output", output]
        outcome = run(*flags, "--input", tmp_path / "j")
        assert outcome.code == 2
        assert outcome.err.startswith("InputUnreadable")
        assert outcome.err.count("\n") == 1
        got = records(output.read_text())
        assert 10 < len(got) < 50
        assert not any(is_error(record) for record in got)

    def test_a_termination_keeps_what_was_finished(self, model, tmp_path):
        lines = write_lines(tmp_path / "j", [{"prompt": f"number {i}"} for i in range(2000)])
        output = tmp_path / "out"
        flags = ["--model", model, *LIMITS[:4], "--max-num-seqs", 2, "--output", output]
        words, environment = command(*flags, "--input", lines, "--max-tokens", 3)
        with subprocess.Popen(
            words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            deadline = time.monotonic() + 120
            while not output.exists() or output.read_bytes().count(b"\n") < 3:
                assert process.poll() is None, process.stderr.read()
                assert time.monotonic() < deadline
                time.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (130, ""), err
        assert "Traceback" not in err
        assert err.splitlines()[-1] == "interrupted; finished results are kept"
        assert 3 <= len(records(output.read_text())) < 2000


def command(*argv):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return [sys.executable, "-m", "runtime.offline", *map(str, argv)], environment
