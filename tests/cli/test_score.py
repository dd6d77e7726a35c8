"""`python -m runtime.score` as a user meets it: scores, taps, perplexity, failures, exit codes."""

import contextlib
import io
import json
import math
import os
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from runtime import cli, engine, score
from tests.helpers.goldens import golden_dir, golden_expected

CASE = "text-quant"
PROMPTS = (0, 1, 4, 5)  # 1, 7, 17 and 53 tokens; of the last one only ids and masks are recorded
SMALL = ["--model", str(golden_dir(CASE)), "--max-model-len", "256", "--block-size", "16"]
KVQUANT = ["--numerics", "reference", "--act-quant", "off"]  # what the golden taps were made with
LIMIT = 1e-4  # tests/golden/README.md: a correct float32 forward is well below


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


def run(*argv):
    """Run the command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.run_main(score.main, [str(word) for word in argv])
    return Outcome(code, out.getvalue(), err.getvalue())


def refused(outcome, code, *parts):
    """Check that nothing was written, and that stderr is one line with these parts."""
    assert (outcome.code, outcome.out) == (code, ""), outcome.err
    assert outcome.err.count("\n") == 1, outcome.err
    for part in parts:
        assert part in outcome.err


def write_lines(path, lines):
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(text + "\n" for text in texts))
    return path


@pytest.fixture(scope="module")
def expected():
    return golden_expected(CASE)


def golden_ids(expected, index):
    return expected[f"p{index}.input_ids"].tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, expected):
    """A folder with the golden prompts."""
    folder = tmp_path_factory.mktemp("score")
    lines = [{"id": f"p{k}", "prompt_token_ids": golden_ids(expected, k)} for k in PROMPTS]
    write_lines(folder / "prompts.jsonl", lines)
    return folder


@pytest.fixture(scope="module")
def whole(folder):
    """Everything that can be written, from one pass over each prompt: outcome and tensors."""
    output = folder / "whole.safetensors"
    flags = ["--taps", "--full-logits", "--json", folder / "whole.json"]
    argv = ["--input", folder / "prompts.jsonl", "--output", output]
    outcome = run(*SMALL, *KVQUANT, *argv, *flags)
    assert outcome.code == 0, outcome.err
    return outcome, load_file(output)


class TestScores:
    def test_logits_are_the_golden_ones(self, whole, expected):
        for k in PROMPTS:
            got, wanted = whole[1][f"p{k}.logits"], expected[f"p{k}.logits"]
            assert (got.dtype, got.shape) == (torch.float32, wanted.shape)
            assert (got - wanted).abs().max() <= LIMIT

    def test_logprobs_are_those_of_the_following_tokens(self, whole, expected):
        for k in PROMPTS:
            ids = torch.tensor(golden_ids(expected, k))
            rows = torch.log_softmax(whole[1][f"p{k}.logits"].double(), -1)
            wanted = rows[:-1].gather(1, ids[1:, None]).squeeze(1)
            got = whole[1][f"p{k}.logprobs"]
            assert (got.dtype, got.shape) == (torch.float32, (len(ids) - 1,))
            assert torch.allclose(got.double(), wanted, rtol=0, atol=1e-5)

    def test_taps_have_their_golden_names_and_forms(self, whole, expected):
        for k in PROMPTS:
            prefix = f"p{k}.taps."
            wanted = {n: v for n, v in expected.items() if n.startswith(prefix)}
            got = {n: v for n, v in whole[1].items() if n.startswith(prefix)}
            assert len(wanted) > 20
            assert wanted.keys() <= got.keys()
            for name, value in wanted.items():
                assert got[name].shape == value.shape, name
                assert got[name].dtype == value.dtype, name
            for name in ("engram_rows", "layers.7.topk_indices", "layers.5.candidate_mask"):
                assert torch.equal(got[prefix + name], wanted[prefix + name]), name
            if f"{prefix}embed" in wanted:  # the golden tests compare every value
                for name in ("embed", "layers.9.streams", "final_hidden"):
                    value = wanted[prefix + name]
                    assert (got[prefix + name] - value).abs().max() <= 1e-3 * value.std(), name

    def test_perplexity_is_printed_and_reported(self, whole, folder):
        outcome, tensors = whole
        logprobs = torch.cat([tensors[f"p{k}.logprobs"] for k in PROMPTS]).double()
        perplexity = math.exp(-logprobs.mean())
        assert outcome.out == f"perplexity {perplexity:.6f} over {len(logprobs)} tokens\n"
        document = json.loads((folder / "whole.json").read_text())
        assert list(document) == ["schema", "config", "environment", "results"]
        assert document["schema"] == "flashreplay.score/1"
        assert "sampling" not in document["config"]
        results = document["results"]
        assert results["tokens"] == len(logprobs)
        assert results["perplexity"] == pytest.approx(perplexity)
        assert results["mean_logprob"] == pytest.approx(float(logprobs.mean()))
        assert results["failed"] == []
        assert results["buckets"]

    def test_decode_gives_the_same_bits(self, whole, folder):
        """Token by token through the same units, taps included."""
        output = folder / "decode.safetensors"
        argv = ["--input", folder / "prompts.jsonl", "--output", output, "--quiet"]
        outcome = run(*SMALL, *KVQUANT, *argv, "--taps", "--full-logits", "--decode")
        assert outcome.code == 0
        assert outcome.out == whole[0].out
        got = load_file(output)
        assert got.keys() == whole[1].keys()
        for name, value in whole[1].items():
            assert torch.equal(got[name], value), name

    def test_only_what_was_asked_for_and_the_same_bits_in_pieces(self, whole, folder):
        """Without flags there are only logprobs; they do not depend on the size of a step."""
        output = folder / "plain.safetensors"
        argv = ["--input", folder / "prompts.jsonl", "--output", output, "--json", "-", "--quiet"]
        pieces = ["--max-num-batched-tokens", 13, "--max-num-seqs", 1]
        outcome = run(*SMALL, *KVQUANT, *argv, *pieces)
        assert outcome.code == 0
        assert json.loads(outcome.out)["results"]["tokens"]  # stdout holds the report alone
        assert outcome.err.splitlines()[0] == whole[0].out.strip()
        got = load_file(output)
        assert got.keys() == {f"p{k}.logprobs" for k in PROMPTS}
        for name, value in got.items():
            assert torch.equal(value, whole[1][name]), name


LINES = [
    ({"id": "a", "prompt_token_ids": [3, 4, 5]}, None),
    ("{broken", "LineNotJson"),
    ({"id": "a", "prompt_token_ids": [3]}, "DuplicateId"),
    ({"id": "empty", "prompt_token_ids": []}, "EmptyPrompt"),
    ({"id": "range", "prompt_token_ids": [3, 384]}, "TokenOutOfRange"),
    ({"id": "long", "prompt_token_ids": [3] * 257}, "PromptTooLong"),
    ({"id": "sampled", "prompt_token_ids": [3], "temperature": 0}, "SamplingFieldInScore"),
    ({"id": "field", "prompt_token_ids": [3], "temp": 0}, "UnknownField"),
    ({"id": "one", "prompt_token_ids": [3]}, None),
    ({"id": "text", "prompt": "hello"}, None),
]


class TestFailures:
    def test_bad_lines_are_counted_and_the_others_are_scored(self, tmp_path):
        output, report = tmp_path / "s.safetensors", tmp_path / "r.json"
        lines = write_lines(tmp_path / "lines", [line for line, _ in LINES])
        outcome = run(*SMALL, "--input", lines, "--output", output, "--json", report)
        assert outcome.code == 1
        wrong = {n: code for n, (_, code) in enumerate(LINES, 1) if code}
        failed = json.loads(report.read_text())["results"]["failed"]
        assert {record["line"]: record["error"]["code"] for record in failed} == wrong
        err = outcome.err.splitlines()
        assert err[-1] == f"{len(wrong)} lines failed"
        for number, code in wrong.items():
            assert sum(line.startswith(f"line {number}: {code}: ") for line in err) == 1
        got = load_file(output)
        assert got.keys() == {"a.logprobs", "one.logprobs", "text.logprobs"}
        assert (len(got["a.logprobs"]), len(got["one.logprobs"])) == (2, 0)
        assert outcome.out.endswith(f" over {2 + len(got['text.logprobs'])} tokens\n")

    def test_the_output_appears_whole_or_not_at_all(self, tmp_path, monkeypatch):
        def fail(_):
            raise OSError(28, os.strerror(28))

        monkeypatch.setattr(cli.os, "fsync", fail)

        def score_one(_engine, _items, _args, tensors):
            tensors["x"] = torch.ones(2)
            return {"failed": [], "perplexity": None, "tokens": 0}

        monkeypatch.setattr(score, "_score_all", score_one)
        lines = write_lines(tmp_path / "lines", [{"id": "a", "prompt_token_ids": [3]}])
        output = tmp_path / "s.safetensors"
        outcome = run(*SMALL, "--input", lines, "--output", output, "--quiet")
        refused(outcome, 1, "OutputUnwritable", "No space left", "--output")
        assert [path.name for path in tmp_path.iterdir()] == ["lines"]

    def test_scores_are_never_overwritten(self, tmp_path):
        output = tmp_path / "s.safetensors"
        output.write_text("precious")
        lines = write_lines(tmp_path / "lines", [{"id": "a", "prompt_token_ids": [3]}])
        outcome = run(*SMALL, "--input", lines, "--output", output)
        refused(outcome, 2, "OutputExists", str(output))
        assert output.read_text() == "precious"

    def test_no_arguments_print_the_help(self):
        outcome = run()
        assert (outcome.code, outcome.out) == (2, "")
        assert outcome.err == score.make_parser().format_help()

    @pytest.mark.parametrize(
        ("argv", "parts"),
        [
            (["--input", "x"], ("BadArguments", "--output FILE.safetensors is needed")),
            (["--output", "new"], ("BadArguments", "--input FILE.jsonl is needed")),
            (["--input", "no such", "--output", "new"], ("InputUnreadable", "no such")),
            (["--prompt", "a"], ("UnknownFlag", "'--prompt'")),
            (["--temperature", "0"], ("UnknownFlag", "'--temperature'")),
            (["--input", "x", "--output", "same", "--json", "same"], ("StdoutTaken", "same")),
        ],
    )
    def test_a_bad_command_line(self, tmp_path, monkeypatch, argv, parts):
        monkeypatch.chdir(tmp_path)
        refused(run(*argv), 2, *parts)
        assert list(tmp_path.iterdir()) == []

    def test_what_does_not_fit_is_refused_before_weights_are_read(self, tmp_path, monkeypatch):
        monkeypatch.setattr(engine, "load_weights", lambda *_: pytest.fail("weights were read"))
        lines = write_lines(tmp_path / "lines", [{"id": "a", "prompt_token_ids": [3]}])
        huge = ["--kv-blocks", 2**31 - 1]
        outcome = run(*SMALL, *huge, "--input", lines, "--output", tmp_path / "s")
        refused(outcome, 3, "MemoryTooSmall", "2147483647 blocks")
