"""python -m runtime.score: teacher-forced log-probabilities, logits and taps of given tokens."""

import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from runtime import cli, jobs
from runtime.config import EngineConfig, SamplingParams
from runtime.env import read_environment
from runtime.errors import SamplingFieldInScore
from runtime.log import configure_logging
from runtime.progress import Progress

if TYPE_CHECKING:
    import argparse

    from torch import Tensor

    from runtime.engine import Engine

PROG = "python -m runtime.score"
SCHEMA = "flashreplay.score/1"


def make_parser() -> cli.CommandParser:
    """Return the command's parser."""
    parser = cli.CommandParser(
        prog=PROG,
        description=(
            "Score given tokens. Writes per id <id>.logprobs [T-1] float32, on request <id>.logits "
            "[T, vocab] float32 and <id>.taps.*, and prints the perplexity."
        ),
        examples=(
            f"{PROG} --model DIR --input prompts.jsonl --output scores.safetensors",
            f"{PROG} --input prompts.jsonl --output taps.safetensors --taps --numerics reference",
        ),
    )
    group = parser.add_argument_group("scoring")
    group.add_argument(
        "--input",
        metavar="FILE.jsonl",
        help='lines of {"id", "prompt_token_ids"} (or "prompt"); - is stdin',
    )
    group.add_argument("--output", metavar="FILE.safetensors", help="new file for the scores")
    group.add_argument("--taps", action="store_true", help="also write intermediate values")
    group.add_argument("--full-logits", action="store_true", help="also write the logits")
    group.add_argument(
        "--decode", action="store_true", help="feed one token at a time (default: off)"
    )
    cli.add_config_flags(parser, EngineConfig, "engine")
    cli.add_common_flags(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    parser = make_parser()
    if not argv:
        sys.stderr.write(parser.format_help())
        return cli.EXIT_USAGE
    args = parser.parse_args(argv)
    env = read_environment(os.environ)
    configure_logging(args.log_level or env.log_level or "info", quiet=args.quiet)
    config, _ = cli.load_config(args, env)
    items = None
    if not args.dump_config:
        if args.input is None:
            parser.error("--input FILE.jsonl is needed")
        if args.output is None:
            parser.error("--output FILE.safetensors is needed")
        if args.output == "-":
            parser.error("--output must be a file: scores are binary")
        cli.check_targets(
            {"--output": args.output, "--json": args.json_path},
            {"--input": args.input, "--config": args.config_file},
        )
        jobs.refuse_existing(args.output, "--output")
        items = jobs.read_jobs(defaults=SamplingParams(), input_file=args.input)

    with cli.deferred_interrupt():  # torch, after the arguments are known good
        from runtime.engine import Engine, plan_engine
        from runtime.metrics import Metrics

    plan = plan_engine(config)
    if items is None:
        sys.stdout.write(cli.dump_config(plan.config, None, plan.decisions))
        return cli.EXIT_DONE
    if not args.quiet:
        sys.stderr.write("\n".join(plan.lines()) + "\n")
    engine = Engine(plan, Metrics())
    tensors: dict[str, Tensor] = {}
    try:
        results = _score_all(engine, items, args, tensors)
    finally:  # an interruption keeps the prompts that were scored
        if tensors:
            _write(args.output, tensors)
    if args.json_path:
        cli.write_json(args.json_path, cli.report(SCHEMA, plan.config, results))
    _say_end(results, to_stdout=args.json_path != "-")
    return cli.EXIT_FAILED if results["failed"] else cli.EXIT_DONE


def _score_all(
    engine: "Engine",
    items: Iterator["jobs.Job | jobs.LineError"],
    args: "argparse.Namespace",
    tensors: dict[str, "Tensor"],
) -> dict[str, Any]:
    from graphs.errors import EngineError
    from runtime.scoring import score_prompt

    failed: list[dict[str, Any]] = []
    total, count = 0.0, 0
    with Progress("prompts", None, "prompts", quiet=args.quiet) as bar:
        for item in items:
            bar.update()
            if isinstance(item, jobs.LineError):
                failed.append(jobs.error_record(item))
                continue
            try:
                ids = _token_ids(engine, item)
                score = score_prompt(engine, ids, is_decode=args.decode, with_taps=args.taps)
            except EngineError as error:
                failed.append(jobs.error_record(jobs.failed_job(item, error)))
                continue
            tensors[f"{item.job_id}.logprobs"] = score.logprobs
            if args.full_logits:
                tensors[f"{item.job_id}.logits"] = score.logits
            tensors |= {f"{item.job_id}.taps.{name}": value for name, value in score.taps.items()}
            total += float(score.logprobs.double().sum())
            count += len(score.logprobs)
    return _results(engine, total, count, failed)


def _token_ids(engine: "Engine", job: "jobs.Job") -> list[int]:
    from runtime.request import check_prompt
    from runtime.scoring import check_blocks

    if job.params != SamplingParams():
        raise SamplingFieldInScore(line=job.line_number)
    ids = job.prompt_token_ids
    if ids is None:
        assert job.prompt is not None, "a job has a prompt"
        ids = engine.tokenizer.encode(job.prompt)
    text, limit = engine.plan.model.text_config, engine.plan.config.max_model_len
    assert limit is not None
    check_prompt(job.job_id, ids, text.vocab_size, limit, reserved=0)
    check_blocks(engine, job.job_id, len(ids))
    return ids


def _results(
    engine: "Engine", total: float, count: int, failed: list[dict[str, Any]]
) -> dict[str, Any]:
    import math

    mean = total / count if count else math.nan
    perplexity = math.exp(-mean) if -mean < 700 else math.inf  # exp overflows above
    return {
        "tokens": count,
        "mean_logprob": mean if math.isfinite(mean) else None,
        "perplexity": perplexity if math.isfinite(perplexity) else None,
        "failed": failed,
        "buckets": [str(bucket) for bucket in engine.executor.captured],
    }


def _write(path: str, tensors: dict[str, "Tensor"]) -> None:
    from pathlib import Path

    from safetensors.torch import save

    from runtime.errors import OutputUnwritable

    try:
        cli.write_atomic(Path(path), save({n: t.contiguous() for n, t in tensors.items()}))
    except OSError as error:
        raise OutputUnwritable(path=path, reason=error.strerror, flag="--output") from error


def _say_end(results: dict[str, Any], to_stdout: bool) -> None:
    for record in results["failed"]:
        error = record["error"]
        sys.stderr.write(f"line {record['line']}: {error['code']}: {error['message']}\n")
    perplexity = results["perplexity"]
    text = "none" if perplexity is None else f"{perplexity:.6f}"
    line = f"perplexity {text} over {results['tokens']} tokens\n"
    (sys.stdout if to_stdout else sys.stderr).write(line)
    sys.stderr.write(f"{len(results['failed'])} lines failed\n")


if __name__ == "__main__":
    sys.exit(cli.run_main(main))
