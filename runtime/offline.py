"""python -m runtime.offline: prompts or JSONL in, JSONL out."""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from runtime import cli, jobs
from runtime.config import EngineConfig, SamplingParams
from runtime.env import read_environment
from runtime.log import configure_logging
from runtime.progress import Progress

if TYPE_CHECKING:
    from runtime.engine import EnginePlan
    from runtime.llm import LLM
    from runtime.request import Request

PROG = "python -m runtime.offline"
SCHEMA = "flashreplay.offline/1"


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
    source = parser.add_argument_group("input, one of")
    source.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be repeated"
    )
    source.add_argument("--prompts", metavar="FILE", help="prompts, one a line; - is stdin")
    source.add_argument(
        "--input",
        metavar="FILE.jsonl",
        help='lines of {"prompt"} or {"prompt_token_ids"}, optional "id" and sampling fields; '
        "- is stdin",
    )
    target = parser.add_argument_group("output")
    target.add_argument(
        "--output", metavar="FILE.jsonl", help="new file for the results (default: stdout)"
    )
    cli.add_config_flags(parser, EngineConfig, "engine")
    cli.add_config_flags(parser, SamplingParams, "sampling, for lines that say nothing")
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
    config, sampling = cli.load_config(args, env)
    cli.check_targets(
        {"--output": args.output or "-", "--json": args.json_path},
        {"--input": args.input, "--prompts": args.prompts, "--config": args.config_file},
    )
    items = None
    if not args.dump_config:
        items = jobs.read_jobs(
            defaults=sampling,
            prompts=args.prompt,
            prompts_file=args.prompts,
            input_file=args.input,
        )

    from runtime.engine import (
        plan_engine,
    )  # torch is imported here, after the arguments are known good

    plan = plan_engine(config)
    if items is None:
        sys.stdout.write(cli.dump_config(plan.config, sampling, plan.decisions))
        return cli.EXIT_DONE
    _announce(plan, args.quiet)
    with jobs.ResultWriter(args.output) as writer:
        results = _run(plan, items, writer, args.quiet)
    if args.json_path:
        document = cli.report(SCHEMA, plan.config, results, sampling)
        cli.write_json(args.json_path, document)
    _say_end(results)
    return cli.EXIT_DONE


def _announce(plan: "EnginePlan", quiet: bool) -> None:
    if quiet:
        return
    for line in plan.lines():
        _say(line)


def _run(
    plan: "EnginePlan",
    items: Iterator["jobs.Job | jobs.LineError"],
    writer: jobs.ResultWriter,
    quiet: bool,
) -> dict[str, Any]:
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
    indices: dict[str, jobs.Job] = {}
    with Progress("requests", None, "requests", quiet=quiet) as bar:

        def fail(line: jobs.LineError) -> None:
            writer.write(line.index, jobs.error_record(line))
            metrics.record_failed()
            bar.update()

        requests = _requests(llm, items, indices, fail)
        for request in llm.run(
            requests, lambda r, e: fail(jobs.failed_job(indices.pop(r.request_id), e))
        ):
            text = request.text.text if request.text else ""
            job = indices[request.group]
            writer.write(job.index, jobs.result_record(request, text))
            bar.update()
    counters = llm.engine.executor.builder.counters
    phases = {"trace": counters.trace_s, "passes": counters.pass_s, "compile": counters.compile_s}
    results = metrics.to_dict()
    results["phases_s"] |= phases
    results["buckets"] = [str(bucket) for bucket in llm.engine.executor.captured]
    results["memory_plan"] = as_json(plan.memory)
    return results


def _requests(
    llm: "LLM",
    items: Iterator["jobs.Job | jobs.LineError"],
    indices: dict[str, jobs.Job],
    fail: Any,
) -> Iterator["Request"]:
    from graphs.errors import EngineError

    for item in items:
        if isinstance(item, jobs.LineError):
            fail(item)
            continue
        prompt = item.prompt if item.prompt is not None else item.prompt_token_ids
        assert prompt is not None, "a job has a prompt"
        try:
            requests = llm.make_requests(item.job_id, prompt, item.params)
        except EngineError as error:
            fail(jobs.failed_job(item, error))
            continue
        indices[item.job_id] = item
        yield from requests


def _say(line: str) -> None:
    with contextlib.suppress(OSError, AttributeError):
        sys.stderr.write(line + "\n")


def _say_end(results: dict[str, Any]) -> None:
    rate = results["output_tokens_per_s"]
    speed = f"{rate:.1f}" if rate is not None else "no"
    _say(
        f"{results['requests']['finished']} requests, {results['output_tokens']} tokens in "
        f"{results['time_s']:.2f} s, {results['building_s']:.2f} s of it building graphs ({speed} "
        f"output tokens/s without that), "
        f"{len(results['buckets'])} graphs captured"
    )
    _say(f"{results['requests']['failed']} lines failed")


if __name__ == "__main__":
    sys.exit(cli.run_main(main))
