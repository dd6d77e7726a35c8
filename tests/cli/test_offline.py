"""`python -m runtime.offline` as a user meets it: results, report, bad input, exit codes.

Most cases call the command inside this process and share its imports; what needs a process of its
own (a signal, start-up) starts one. Long because it holds one case for every kind of bad input.
"""

import contextlib
import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

from backends.capability import probe_cpu
from model.config_reader import IGNORED_KEYS
from model.load import load_plan
from runtime import cli, engine, offline
from runtime.config import EngineConfig, SamplingParams
from runtime.errors import MemoryTooSmall
from runtime.fields import fields_by_name
from runtime.memory import plan_memory
from tests.helpers.goldens import copy_golden, golden_dir
from tests.helpers.raw_safetensors import RawTensor, read_raw, write_raw, write_shards

ROOT = Path(__file__).resolve().parents[2]
CASE = "text-quant"
MAX_MODEL_LEN = 96
SMALL = ["--model", str(golden_dir(CASE)), "--max-model-len", str(MAX_MODEL_LEN)]
BLOCKS = ["--block-size", "16"]
OPEN = {"model", "revision"}  # the only settings that may stay open: the built-in checkpoint
COUNTERS = {"traces", "compiles", "jit", "captures", "replays", "graph_misses"}

TWIN = {"prompt": "hello there", "seed": 7, "top_p": 0.9, "max_tokens": 20, "ignore_eos": True}
GOOD = [
    {"id": "text", "prompt": "The quick brown fox", "max_tokens": 6},
    {"id": "greedy", "prompt_token_ids": [0, 5, 6, 7], "temperature": 0, "max_tokens": 20},
    {"id": "seeded", **TWIN},
    {"id": "hot", "prompt": "x", "temperature": 2.5, "top_k": 50, "max_tokens": 20},
    {"id": "twin", **TWIN},
    {"id": "long", "prompt_token_ids": [9 + i % 50 for i in range(61)], "max_tokens": 5},
    {"id": "full", "prompt_token_ids": [3] * (MAX_MODEL_LEN - 1), "max_tokens": 9},
]
# Every way in which one line can be wrong: the line, the code of its error record, its id if it has
# one that can be read.
BAD = [
    ('{"prompt": "broken', "LineNotJson", None),
    ("\xff\xfe", "LineNotText", None),
    ("[1, 2]", "LineNotObject", None),
    ({"id": "none"}, "PromptMissing", "none"),
    ({"id": "both", "prompt": "a", "prompt_token_ids": [3]}, "PromptMissing", "both"),
    ({"id": "type", "prompt_token_ids": [3, True]}, "BadPrompt", "type"),
    ({"id": 5, "prompt": "a"}, "BadId", None),
    ({"id": "text", "prompt": "again"}, "DuplicateId", "text"),
    ({"id": "empty", "prompt": ""}, "EmptyPrompt", "empty"),
    ({"id": "no ids", "prompt_token_ids": []}, "EmptyPrompt", "no ids"),
    ({"id": "too long", "prompt_token_ids": [3] * MAX_MODEL_LEN}, "PromptTooLong", "too long"),
    ({"id": "range", "prompt_token_ids": [3, 384]}, "TokenOutOfRange", "range"),
    ({"id": "negative", "prompt_token_ids": [-1]}, "TokenOutOfRange", "negative"),
    ({"id": "value", "prompt": "a", "temperature": -1}, "FieldRangeError", "value"),
    ({"id": "top_p", "prompt": "a", "top_p": 0}, "FieldRangeError", "top_p"),
    ({"id": "tokens", "prompt": "a", "max_tokens": "3"}, "FieldTypeError", "tokens"),
    ({"id": "field", "prompt": "a", "max_token": 3}, "UnknownField", "field"),
]


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


def run(*argv, environ=None):
    """Run the command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.run_main(offline.main, [str(word) for word in argv])
    return Outcome(code, out.getvalue(), err.getvalue())


def refused(outcome, code, *parts):
    """Check that nothing was written, and that stderr is one line with these parts."""
    assert (outcome.code, outcome.out) == (code, ""), outcome.err
    assert outcome.err.count("\n") == 1, outcome.err
    for part in parts:
        assert part in outcome.err


def write_lines(path, lines):
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_bytes("".join(text + "\n" for text in texts).encode("latin-1"))
    return path


def records(text):
    return [json.loads(line) for line in text.splitlines()]


def good_records(path):
    """Return the records of finished requests by id."""
    return {record["id"]: record for record in records(path.read_text()) if "error" not in record}


def mixed_lines():
    """Return good and bad lines in turn, the bad ones' line numbers with code and id."""
    lines, wrong = [], {}
    for index, (line, code, job_id) in enumerate(BAD):
        lines += [GOOD[index]] if index < len(GOOD) else [""]  # blank lines are no lines
        lines.append(line)
        wrong[len(lines)] = (code, job_id if job_id is not None else str(len(lines) - 1))
    return lines, wrong


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """One job over good and bad lines: its folder and outcome."""
    folder = tmp_path_factory.mktemp("job")
    write_lines(folder / "jobs.jsonl", mixed_lines()[0])
    output = ["--output", folder / "results.jsonl", "--json", folder / "summary.json"]
    outcome = run(*SMALL, *BLOCKS, "--input", folder / "jobs.jsonl", *output)
    return folder, outcome


class TestResults:
    def test_every_line_has_its_result_in_the_order_of_the_input(self, job):
        folder, outcome = job
        lines, wrong = mixed_lines()
        assert outcome.code == 0
        assert outcome.out == ""
        got = records((folder / "results.jsonl").read_text())
        expected = [
            wrong[number][1] if number in wrong else line["id"]
            for number, line in enumerate(lines, 1)
            if line != ""
        ]
        assert [record["id"] for record in got] == expected

    def test_a_bad_line_says_where_and_what(self, job):
        got = records((job[0] / "results.jsonl").read_text())
        failed = {record["line"]: record for record in got if "error" in record}
        wrong = mixed_lines()[1]
        assert {
            number: (record["error"]["code"], record["id"]) for number, record in failed.items()
        } == wrong
        for number, record in failed.items():
            message = record["error"]["message"]
            assert set(record) == {"id", "line", "error"}
            assert f"line {number}" in message or f"'{record['id']}'" in message
            assert "\n" not in message
        assert job[1].err.splitlines()[-1] == f"{len(wrong)} lines failed"

    def test_a_good_line_has_its_tokens(self, job):
        got = good_records(job[0] / "results.jsonl")
        for line in GOOD:
            record = got[line["id"]]
            assert set(record) == {
                *("id", "prompt_tokens", "completion_tokens", "text", "token_ids", "finish_reason")
            }
            assert len(record["token_ids"]) == record["completion_tokens"] >= 1
            assert record["finish_reason"] in ("stop", "length")
        assert got["greedy"]["prompt_tokens"] == 4
        assert got["full"]["completion_tokens"] == 1  # one place was left
        assert got["seeded"]["token_ids"] == got["twin"]["token_ids"]
        assert got["seeded"]["completion_tokens"] == TWIN["max_tokens"]

    def test_the_report(self, job):
        document = json.loads((job[0] / "summary.json").read_text())
        assert list(document) == ["schema", "config", "environment", "results"]
        assert document["schema"] == "flashreplay.offline/1"
        config = document["config"]
        assert set(config) == {*fields_by_name(EngineConfig), "sampling"}
        assert set(config["sampling"]) == set(fields_by_name(SamplingParams))
        assert config["max_model_len"] == MAX_MODEL_LEN
        assert {name for name, value in config.items() if value is None} <= OPEN
        assert document["environment"]["torch"]
        results = document["results"]
        assert results["requests"] == {"finished": len(GOOD), "failed": len(BAD)}
        got = good_records(job[0] / "results.jsonl").values()
        assert results["output_tokens"] == sum(record["completion_tokens"] for record in got)
        assert results["prompt_tokens"] == sum(record["prompt_tokens"] for record in got)
        # The last token of a request is sampled and never computed.
        assert results["decode"]["tokens"] == results["output_tokens"] - len(GOOD)
        assert results["prefill"]["tokens"] == results["prompt_tokens"]
        for name in ("prefill", "decode"):
            part = results[name]
            assert part["tokens_per_s"] == pytest.approx(part["tokens"] / part["time_s"])
        assert results["output_tokens_per_s"] > 0
        assert 0 < results["time_to_first_token_s"]["first"] <= results["time_s"]
        assert results["peak_memory_bytes"] > 2**20
        counters = results["counters"]
        assert set(counters) == COUNTERS
        assert counters["captures"] == len(results["buckets"]) == len(set(results["buckets"])) > 0
        assert counters["traces"] >= counters["captures"]
        assert counters["replays"] == results["steps"]
        assert (counters["compiles"], counters["graph_misses"]) == (0, 0)

    def test_the_memory_plan_comes_first_and_adds_up(self, job):
        lines = job[1].err.splitlines()
        assert lines[0] == "memory plan:"
        plan = json.loads((job[0] / "summary.json").read_text())["results"]["memory_plan"]
        rows = {row["kind"]: row for row in plan["rows"]}
        assert {"weights: experts", "Engram tables", "KV blocks", "graphs and scratch"} <= set(rows)
        assert not rows["Engram tables"]["is_resident"]
        resident = sum(row["num_bytes"] for row in plan["rows"] if row["is_resident"])
        assert plan["resident_bytes"] == resident <= plan["available_bytes"]
        for kind in rows:
            assert any(line.startswith(f"  {kind} ") for line in lines)
        assert any(line.startswith("kind = reference (") and "--kind" in line for line in lines)

    def test_an_equal_job_writes_equal_bytes_to_stdout(self, job):
        folder = job[0]
        again = run(*SMALL, *BLOCKS, "--input", folder / "jobs.jsonl", "--quiet")
        assert again.code == 0
        assert again.out == (folder / "results.jsonl").read_text()
        assert "memory plan" not in again.err

    @pytest.mark.parametrize(
        ("flags", "counter"),
        [
            (["--max-num-seqs", "2", "--max-num-batched-tokens", "21", *BLOCKS], "mixed_steps"),
            # The longest request alone needs 48 blocks; seven requests want more than there are.
            (["--kv-blocks", "49", "--block-size", "2"], "preemptions"),
        ],
        ids=["few rows a step", "tiny pool"],
    )
    def test_limits_of_the_engine_do_not_change_results(self, job, tmp_path, flags, counter):
        folder = job[0]
        report = tmp_path / "summary.json"
        files = ["--output", tmp_path / "results.jsonl", "--json", report]
        other = run(*SMALL, *flags, "--input", folder / "jobs.jsonl", *files)
        assert other.code == 0
        same = (folder / "results.jsonl").read_bytes()
        assert (tmp_path / "results.jsonl").read_bytes() == same
        assert json.loads(report.read_text())["results"][counter] > 0

    def test_a_seed_gives_the_same_tokens_alone(self, job, tmp_path):
        """Another id, another line, nobody else in the batch, the report on stdout."""
        lines = write_lines(tmp_path / "j", [{"prompt": "hello there"}])
        flags = ["--sampling-seed", 7, "--top-p", 0.9, "--max-tokens", 20, "--ignore-eos"]
        alone = run(*SMALL, "--input", lines, *flags, "--output", tmp_path / "r", "--json", "-")
        got = good_records(job[0] / "results.jsonl")
        (record,) = records((tmp_path / "r").read_text())
        assert record == {**got["seeded"], "id": "0"}
        assert json.loads(alone.out)["config"]["sampling"]["seed"] == 7


class TestUsage:
    def test_no_arguments_print_the_help(self):
        outcome = run()
        assert (outcome.code, outcome.out) == (2, "")
        assert outcome.err == offline.make_parser().format_help()

    @pytest.mark.parametrize(
        ("argv", "parts"),
        [
            (["--promt", "a"], ("UnknownFlag", "'--promt'", "Did you mean --prompt")),
            (["--prompt"], ("BadArguments", "expected one argument")),
            (["--max-tokens", "3"], ("NoPrompts", "got none")),
            (["--prompt", "a", "--input", "b"], ("NoPrompts", "--prompt and --input")),
            (["--prompt", ""], ("EmptyPrompt",)),
            (["--prompts", "no such file"], ("InputUnreadable", "no such file", "--prompts")),
            (["--input", "."], ("InputUnreadable", "--input")),
            (["--prompt", "a", "--temperature", "-1"], ("FieldRangeError", "--temperature")),
            (["--prompt", "a", "--max-tokens", "0"], ("FieldRangeError", "--max-tokens")),
            (["--prompt", "a", "--top-k", "1.5"], ("FieldTypeError", "--top-k")),
            (["--prompt", "a", "--numerics", "fast"], ("FieldChoiceError", "official, reference")),
            (["--prompt", "a", "--config", "no.toml"], ("ConfigFileUnreadable", "no.toml")),
            (["--prompt", "a", "--json", "-"], ("StdoutTaken", "--output", "--json")),
            (
                ["--prompt", "a", "--max-num-seqs", "9", "--max-num-batched-tokens", "8"],
                ("FieldConflict",),
            ),
            (
                ["--prompt", "a", *SMALL[:2], "--max-model-len", "5000"],
                ("FieldRangeError", "'max_model_len' is 5000", "4096"),
            ),
        ],
    )
    def test_a_bad_command_line(self, argv, parts):
        refused(run(*argv), 2, *parts)

    @pytest.mark.parametrize(
        ("name", "value", "code", "parts"),
        [
            ("FLASHREPLAY_LOGLEVEL", "info", 2, ("UnknownVariable", "FLASHREPLAY_LOG_LEVEL")),
            ("FLASHREPLAY_NUM_THREADS", "many", 2, ("BadVariable", "'many'")),
            ("FLASHREPLAY_BACKEND", "cuda", 3, ("BackendUnavailable", "Available: cpu")),
        ],
    )
    def test_a_bad_variable(self, monkeypatch, name, value, code, parts):
        monkeypatch.setenv(name, value)
        refused(run("--prompt", "a"), code, *parts)

    def test_results_are_never_overwritten(self, tmp_path):
        path = tmp_path / "results.jsonl"
        path.write_text("precious\n")
        outcome = run(*SMALL, "--prompt", "a", "--output", path, "--quiet")
        refused(outcome, 2, "OutputExists", str(path), "9 bytes")
        assert path.read_text() == "precious\n"

    def test_an_output_that_cannot_be_made(self, tmp_path):
        outcome = run(*SMALL, "--prompt", "a", "--output", tmp_path / "no" / "r", "--quiet")
        refused(outcome, 1, "OutputUnwritable", "--output")

    def test_a_dumped_configuration_is_read_back(self, tmp_path):
        flags = [
            "--seed",
            "3",
            "--cache-quant",
            "off",
            "--max-tokens",
            "9",
            "--stop-token-ids",
            "4,5",
        ]
        first = run(*SMALL, *BLOCKS, *flags, "--dump-config")
        assert first.code == 0
        (tmp_path / "c.toml").write_text(first.out)
        second = run("--config", tmp_path / "c.toml", "--dump-config")
        assert second.code == 0
        settings = tomllib.loads(second.out)
        assert settings == tomllib.loads(first.out)
        assert settings["sampling"]["stop_token_ids"] == [4, 5]
        assert {*fields_by_name(EngineConfig)} - set(settings) <= OPEN
        assert "#" in first.out  # the reasons of what was chosen
        assert "kind =" in second.out and "# no complete cache" not in second.out
        flag_wins = run("--config", tmp_path / "c.toml", "--seed", "4", "--dump-config")
        assert tomllib.loads(flag_wins.out)["seed"] == 4


def without(name):
    def damage(directory):
        tensors = read_raw(directory / "model.safetensors")
        del tensors[name]
        write_raw(directory / "model.safetensors", tensors)

    return damage


def replaced(name, dtype=None, shape=None):
    def damage(directory):
        tensors = read_raw(directory / "model.safetensors")
        old = tensors.get(name, RawTensor("F32", [2], bytes(8)))
        tensors[name] = RawTensor(dtype or old.dtype, shape or old.shape, old.data)
        write_raw(directory / "model.safetensors", tensors)

    return damage


def without_shard(directory):
    paths = write_shards(directory, read_raw(directory / "model.safetensors"), 3)
    (directory / "model.safetensors").unlink()
    paths[1].unlink()


def truncated(directory):
    path = directory / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1000)


def configured(section=None, **values):
    def damage(directory):
        path = directory / "config.json"
        raw = json.loads(path.read_text())
        (raw if section is None else raw[section]).update(values)
        path.write_text(json.dumps(raw))

    return damage


def without_file(name):
    return lambda directory: (directory / name).unlink()


def ratios(*values):
    return configured("text_config", compress_ratios=list(values))


NORM = "layers.0.attn.q_norm.weight"
DAMAGES = {
    "no config": (without_file("config.json"), "ConfigNotFound", "config.json"),
    "missing shard": (without_shard, "MissingShard", "model-00002-of-00003.safetensors"),
    "truncated shard": (truncated, "TruncatedShard", "expected", "bytes, got"),
    "wrong dtype": (replaced("layers.0.attn.attn_sink", dtype="I32"), "WrongDtype", "got I32"),
    "wrong shape": (replaced(NORM, shape=[2, 32]), "WrongShape", f"'{NORM}'", "got [2, 32]"),
    "missing tensor": (without(NORM), "MissingTensor", f"'{NORM}'"),
    "missing scale": (without("layers.0.attn.wq_a.scale"), "MissingScale", "wq_a.scale"),
    "unknown tensor": (replaced("layers.0.attn.extra"), "UnknownTensor", "layers.0.attn.extra"),
    "load rule 1": (ratios(0, 0, 2, 2, 2, 1, 1, 1, 1), "CompressRatiosLength", "rule 1", "got 9"),
    "load rule 2": (ratios(0, 0, 0, 2, 2, 1, 1, 1, 1, 1), "SourceWithoutRatio", "rule 2"),
    "load rule 3": (ratios(0, 0, 2, 1, 2, 1, 1, 1, 1, 1), "SegmentRatioMismatch", "rule 3"),
    "unknown key": (configured("text_config", top_kk=3), "UnknownConfigKey", "top_kk"),
    "no tokenizer": (without_file("tokenizer.json"), "TokenizerNotFound"),
}


class TestCheckpoint:
    @pytest.mark.parametrize("name", DAMAGES)
    def test_a_damaged_checkpoint_is_one_line_and_leaves_nothing(self, tmp_path, name):
        damage, *parts = DAMAGES[name]
        directory = copy_golden(CASE, tmp_path / "model")
        damage(directory)
        output = tmp_path / "results.jsonl"
        outcome = run("--model", directory, "--prompt", "a", "--quiet", "--output", output)
        refused(outcome, 1, *parts)
        assert not output.exists()

    def test_a_folder_that_is_not_there(self, tmp_path):
        outcome = run("--model", tmp_path / "gone", "--prompt", "a", "--quiet")
        assert outcome.code in (cli.EXIT_FAILED, cli.EXIT_USAGE)
        refused(outcome, outcome.code, str(tmp_path / "gone"))

    def test_keys_without_meaning_pass(self, tmp_path):
        directory = copy_golden(CASE, tmp_path / "model")
        for section in (None, "text_config"):
            configured(section, **dict.fromkeys(IGNORED_KEYS, 1))(directory)
        outcome = run("--model", directory, "--dump-config")
        assert (outcome.code, outcome.err) == (0, "")


class TestMemory:
    @pytest.mark.parametrize(
        ("num_seqs", "what"),
        [(4, "the weights"), (500, "the engine's state")],
    )
    def test_what_does_not_fit_is_refused_with_the_numbers(
        self, monkeypatch, tmp_path, num_seqs, what
    ):
        """One byte too few of what is refused; no weight is read and no file made."""
        settings = {"max_model_len": MAX_MODEL_LEN, "block_size": 16, "max_num_seqs": num_seqs}
        config = EngineConfig(model=str(golden_dir(CASE)), **settings)
        rows = {row.kind: row for row in engine.plan_engine(config).memory.rows}
        weights = sum(row.num_bytes for kind, row in rows.items() if kind.startswith("weights"))
        state = sum(rows[kind].num_bytes for kind in ("KV blocks", "request state"))
        available = {
            "the weights": weights - 1,
            "the engine's state": weights + state // 2,
        }[what]
        small = dataclasses.replace(probe_cpu(), available_bytes=available)
        monkeypatch.setattr(engine, "probe_cpu", lambda: small)
        monkeypatch.setattr(engine, "load_weights", lambda *_: pytest.fail("weights were read"))
        output = tmp_path / "results.jsonl"
        flags = ["--max-num-seqs", num_seqs, "--output", output, "--quiet"]
        outcome = run(*SMALL, *BLOCKS, "--prompt", "a", *flags)
        refused(outcome, 3, f"MemoryTooSmall: {what} needs", "bytes are free")
        assert not output.exists()

    def test_the_plan_itself_refuses_one_byte_too_few(self):
        """Whatever `resolve` chose: the sum of the plan is checked against the machine."""
        plan = engine.plan_engine(EngineConfig(model=str(golden_dir(CASE))))
        items = load_plan(plan.checkpoint, plan.model, "official")
        enough = plan.memory.resident_bytes
        arguments = (items, plan.model.text_config, plan.compile_config, plan.config)
        fits = dataclasses.replace(probe_cpu(), available_bytes=enough)
        assert plan_memory(*arguments, fits).resident_bytes == enough
        small = dataclasses.replace(fits, available_bytes=enough - 1)
        with pytest.raises(MemoryTooSmall, match=f"the job needs {enough}"):
            plan_memory(*arguments, small)

    def test_a_request_that_never_fits_is_its_own_failure(self, tmp_path):
        line = {"id": "big", "prompt_token_ids": [3] * 40, "max_tokens": 30}
        lines = write_lines(tmp_path / "j", [line, {"id": "small", "prompt": "a"}])
        outcome = run(*SMALL, *BLOCKS, "--kv-blocks", 4, "--input", lines, "--max-tokens", 1)
        assert outcome.code == 0
        big, small = records(outcome.out)
        assert big["error"]["code"] == "RequestNeverFits"
        assert "raise --kv-blocks to 6" in big["error"]["message"]
        assert small["completion_tokens"] == 1

    def test_the_plan_needs_less_than_a_second(self):
        start = time.perf_counter()
        engine.plan_engine(EngineConfig(model=str(golden_dir(CASE))))
        assert time.perf_counter() - start < 1


def command(*argv):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return [sys.executable, "-m", "runtime.offline", *map(str, argv)], environment


class TestProcess:
    def test_the_built_in_checkpoint(self, tmp_path):
        """As a newcomer starts it, from another folder."""
        words, environment = command("--prompt", "The quick brown fox", "--max-tokens", 3)
        done = subprocess.run(
            words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        (record,) = records(done.stdout)
        assert record["completion_tokens"] == 3
        assert "the built-in checkpoint" in done.stderr
        assert list(tmp_path.iterdir()) == []

    def test_an_interrupt_keeps_what_was_finished(self, tmp_path):
        num_lines = 400
        lines = write_lines(
            tmp_path / "jobs", [{"prompt": f"number {i}"} for i in range(num_lines)]
        )
        output = tmp_path / "results.jsonl"
        flags = ["--max-num-seqs", 2, "--max-tokens", 3, "--output", output]
        words, environment = command(*SMALL, "--input", lines, *flags)
        process = subprocess.Popen(
            words,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A shell may have started the tests with the signal ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        try:
            deadline = time.monotonic() + 120
            while not output.exists() or output.read_bytes().count(b"\n") < 3:
                assert process.poll() is None, process.stderr.read()
                assert time.monotonic() < deadline
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
        assert process.returncode == 130, err
        assert out == ""
        assert "Traceback" not in err
        assert err.splitlines()[-1] == "interrupted; finished results are kept"
        got = records(output.read_text())
        assert 3 <= len(got) < num_lines
        assert all(record["completion_tokens"] for record in got)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["jobs", "results.jsonl"]
