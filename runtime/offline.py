"""python -m runtime.offline: prompts or JSONL in, JSONL out."""

import argparse
import contextlib
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from runtime import cli
from runtime.config import EngineConfig, SamplingParams
from runtime.env import read_environment
from runtime.job_output import ResultWriter
from runtime.jobs import Job, LineError, error_record, read_jobs
from runtime.log import configure_logging
from runtime.progress import Progress

if TYPE_CHECKING:
    from runtime.engine import EnginePlan

PROG = "python -m runtime.offline"
SCHEMA = "flashreplay.offline/1"
VALIDATE_SCHEMA = "flashreplay.offline.validate/1"
PLAN_SCHEMA = "flashreplay.offline.plan/1"

Items = Iterator[Job | LineError]


def make_parser() -> cli.CommandParser:
    """Return the command's parser."""
    parser = cli.CommandParser(
        prog=PROG,
        description="Complete prompts and write one JSON result a line, whatever happens to one.",
        examples=(
            f'{PROG} --prompt "Once upon a time" --max-tokens 32',
            f"{PROG} --model DIR --input jobs.jsonl --output results.jsonl --json summary.json",
        ),
    )
    _add_job_flags(parser)
    cli.add_config_flags(parser, EngineConfig, "engine")
    cli.add_config_flags(parser, SamplingParams, "sampling, for lines that say nothing")
    cli.add_common_flags(parser)
    return parser


def _add_job_flags(parser: argparse.ArgumentParser) -> None:
    source = parser.add_argument_group("input, one of")
    source.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be repeated"
    )
    source.add_argument("--prompts", metavar="FILE", help="prompts, one a line; - is stdin")
    source.add_argument(
        "--input",
        metavar="FILE.jsonl",
        help='lines of {"prompt"}, {"prompt_token_ids"} or {"messages"}, optional "id" and '
        "sampling fields, or of an OpenAI batch file; also gzip; - is stdin",
    )
    target = parser.add_argument_group("output")
    target.add_argument(
        "--output", metavar="FILE.jsonl", help="new file for the results (default: stdout)"
    )
    target.add_argument(
        "--output-order",
        choices=("completion", "input"),
        default="input",
        metavar="completion|input",
        help="order of the results (default: input)",
    )
    instead = parser.add_argument_group("instead of a run, one of").add_mutually_exclusive_group()
    instead.add_argument(
        "--validate",
        action="store_true",
        help="check the input without a model: an error record for each bad line, exit code 1 if "
        "there is one",
    )
    instead.add_argument(
        "--plan",
        action="store_true",
        help="print tokens, lengths and estimated steps; reads no weights",
    )


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    parser = make_parser()
    if not argv:
        sys.stderr.write(parser.format_help())
        return cli.EXIT_USAGE
    args = parser.parse_args(argv)
    if args.plan and args.output:
        parser.error("--plan has no results: leave out --output")
    env = read_environment(os.environ)
    configure_logging(args.log_level or env.log_level or "info", quiet=args.quiet)
    config, sampling = cli.load_config(args, env)
    cli.check_targets(
        {"--output": args.output or "-", "--json": args.json_path},
        {"--input": args.input, "--prompts": args.prompts, "--config": args.config_file},
    )
    if args.dump_config:
        return _dump(config, sampling)
    items = read_jobs(
        defaults=sampling,
        prompts=args.prompt,
        prompts_file=args.prompts,
        input_file=args.input,
        has_chat=True,
    )
    if args.validate:
        return _validate(items, config, sampling, args)
    if args.plan:
        return _plan(items, config, sampling, args)
    return _run(items, config, sampling, args)


def _dump(config: EngineConfig, sampling: SamplingParams) -> int:
    with cli.deferred_interrupt():  # torch is imported only when the arguments are known good
        from runtime.engine import plan_engine

    plan = plan_engine(config)
    sys.stdout.write(cli.dump_config(plan.config, sampling, plan.decisions))
    return cli.EXIT_DONE


def _validate(
    items: Items, config: EngineConfig, sampling: SamplingParams, args: argparse.Namespace
) -> int:
    num_lines, codes = 0, Counter[str]()
    with ResultWriter(args.output) as writer:
        for item in items:
            num_lines += 1
            if isinstance(item, LineError):
                writer.write(codes.total(), error_record(item))
                codes[item.code] += 1
    results = {"lines": num_lines, "failed": codes.total(), "codes": dict(sorted(codes.items()))}
    _report(VALIDATE_SCHEMA, results, config, sampling, args)
    _say(f"{num_lines} lines read")
    _say_failed(codes.total())
    return cli.EXIT_FAILED if codes else cli.EXIT_DONE


def _plan(
    items: Items, config: EngineConfig, sampling: SamplingParams, args: argparse.Namespace
) -> int:
    with cli.deferred_interrupt():
        from model.config import ModelConfig
        from model.tokenizer import Tokenizer
        from runtime.engine import BUILT_IN_MODEL
        from runtime.hub import locate_tokenizer
        from runtime.job_plan import plan_job

    directory = locate_tokenizer(config) if config.model else BUILT_IN_MODEL
    model = ModelConfig.from_dir(directory)
    plan = plan_job(items, Tokenizer.from_dir(directory, model), model, config)
    sys.stdout.write("".join(line + "\n" for line in plan.lines()))
    _report(PLAN_SCHEMA, plan.to_dict(), config, sampling, args)
    _say_failed(plan.num_failed)
    return cli.EXIT_DONE


def _run(
    items: Items, config: EngineConfig, sampling: SamplingParams, args: argparse.Namespace
) -> int:
    with cli.deferred_interrupt():
        from runtime.engine import plan_engine

    plan = plan_engine(config)
    if not args.quiet:
        for line in plan.lines():
            _say(line)
    with ResultWriter(args.output, is_ordered=args.output_order == "input") as writer:
        results = _generate(plan, items, writer, args.quiet)
    _report(SCHEMA, results, plan.config, sampling, args)
    _say_speed(results)
    _say_failed(results["requests"]["failed"])
    return cli.EXIT_DONE


def _generate(
    plan: "EnginePlan", items: Items, writer: ResultWriter, quiet: bool
) -> dict[str, Any]:
    from runtime.job_run import JobRun
    from runtime.llm import LLM
    from runtime.memory import as_json
    from runtime.metrics import Metrics

    metrics = Metrics()
    with Progress("weights", None, "B", quiet=quiet) as bar:
        done = 0

        def advance(num_done: int, _total: int) -> None:
            nonlocal done
            bar.update(num_done - done)
            done = num_done

        llm = LLM.from_plan(plan, metrics, advance)
    metrics.start_job()
    with Progress("lines", None, "lines", quiet=quiet) as bar:
        JobRun(llm, writer, bar.update).run(items)
    counters = llm.engine.executor.builder.counters
    phases = {"trace": counters.trace_s, "passes": counters.pass_s, "compile": counters.compile_s}
    results = metrics.to_dict()
    results["phases_s"] |= phases
    results["buckets"] = [str(bucket) for bucket in llm.engine.executor.captured]
    results["memory_plan"] = as_json(plan.memory)
    return results


def _report(
    schema: str,
    results: dict[str, Any],
    config: EngineConfig,
    sampling: SamplingParams,
    args: argparse.Namespace,
) -> None:
    if args.json_path:
        cli.write_json(args.json_path, cli.report(schema, config, results, sampling))


def _say(line: str) -> None:
    with contextlib.suppress(OSError, AttributeError):
        sys.stderr.write(line + "\n")


def _say_speed(results: dict[str, Any]) -> None:
    rate = results["output_tokens_per_s"]
    speed = f"{rate:.1f}" if rate is not None else "no"
    _say(
        f"{results['requests']['finished']} requests, {results['output_tokens']} tokens in "
        f"{results['time_s']:.2f} s, {results['building_s']:.2f} s of it building graphs ({speed} "
        f"output tokens/s without that), "
        f"{len(results['buckets'])} graphs captured"
    )


def _say_failed(num_failed: int) -> None:
    _say(f"{num_failed} lines failed")


if __name__ == "__main__":
    # What ends a batch job from outside ends it as Ctrl-C does: finished results are kept.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(cli.run_main(main))
