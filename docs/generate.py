"""Write the documents that are made from code: `cli.md`, `environment.md` and `ops.md`.

`python docs/generate.py` rewrites them; with `--check` it writes nothing and fails if one of them
differs from what would be written.
"""

import argparse
import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # the packages of this checkout, installed or not

from graphs.errors import EngineError  # noqa: E402 - behind the line above
from runtime import env_report, offline, score  # noqa: E402
from runtime.cli import CommandParser  # noqa: E402
from runtime.env import environment_table  # noqa: E402

NOTE = "<!-- Written by `python docs/generate.py` from the code; edit that instead. -->"
PARSERS = (offline.make_parser, score.make_parser, env_report.make_parser)
ERROR_MODULES = (
    "graphs.errors",
    "model.errors",
    "passes.errors",
    "runtime.errors",
)
EXIT_CODES = (
    ("0", "done; `runtime.offline` wrote one line for every input line, error records included"),
    (
        "1",
        "failed; of `--validate`: a line is bad; of `runtime.score` also: a line could not be "
        "scored, the others were",
    ),
    ("2", "usage: a flag, a variable, a configuration file, or an input that cannot be opened"),
    ("3", "this machine cannot: memory, disk, network, or a backend that this version lacks"),
    ("4", "a precompiled artifact does not match"),
    ("130", "interrupted"),
)

CLI_INTRO = """\
# Command line

Results go to stdout, everything else to stderr. A value comes from, in rising order: the default,
the environment, the `--config` file, the flag. `--dump-config` prints all settings as a file that
`--config` reads, with the reason of every choice that was made for this model and machine, and
ends.
"""

CLI_FORMS = """\
## `--model`

A folder with `config.json`, `tokenizer.json` and safetensors files; or an id of the Hugging Face
hub, `owner/name`, with a branch, tag or commit behind `@` or in `--revision` (default: `main`). A
folder wins. Where the parent of a missing path exists, `owner/name` counts as a mistyped path;
`owner/name@main` never does.

The files that are read go into the cache of `huggingface_hub`, whose variables hold here:
`HF_HOME`, `HF_HUB_CACHE`, `HF_HUB_OFFLINE`, `HF_ENDPOINT`, `HF_TOKEN`. Files that are complete are
never fetched again, so a download that broke off goes on with the same command. Free disk space
and memory are checked before weights are fetched. Without a network a complete snapshot in the
cache is used, with a warning. The report and `--dump-config` name the commit that was used; a run
with `--revision COMMIT` asks the hub for nothing that is in the cache.

## Configuration file

TOML. Top-level keys are the engine's settings, the table `[sampling]` has the sampling settings.
Keys are the flags without dashes and with underscores (`max_num_seqs`); of `--sampling-seed` it
is `seed` in `[sampling]`. Values are typed: `cache_quant = false`, not `"off"`. Unknown keys are
errors.

```toml
model = "/path/to/checkpoint"
max_num_seqs = 8

[sampling]
temperature = 0
max_tokens = 64
```

## Lines of `--input`

One JSON object a line, UTF-8, at most 32 MiB; blank lines are skipped, a byte-order mark and CRLF
are fine, and a file or stream that begins as gzip does is unpacked. Forms may be mixed:

- `prompt` (text) or `prompt_token_ids` (used as they are; nothing is put in front).
- `messages`, a chat, with `tools`, `tool_choice` (`none` or `auto`), `thinking`
  (`{"type": "enabled"}` or `{"type": "disabled"}`) and `reasoning_effort` as in OpenAI's chat
  completions. It needs the extra `chat` and a tokenizer with the tokens of the format.
- A line of an OpenAI batch file: `custom_id`, `method`, `url` (`/v1/chat/completions` or
  `/v1/completions`), `body`.

The first two have an optional `id` (text, unique; without it the line's number, from 0) and any
sampling setting under its name. `runtime.score` reads the first only.

In a body, settings have OpenAI's names; those of ours that OpenAI lacks are accepted too. `model`
is echoed. `user`, `metadata`, `store`, `service_tier`, `safety_identifier`, `prompt_cache_key` and
`stream: false` change nothing; an unknown field is an error. A chat body without a limit runs to
`--max-model-len`, unless `--max-tokens` is changed from its default. Temperature and `top_p` count
in thinking mode too. A completions body has one prompt.

## Results of `runtime.offline`

A result has `id`, `prompt_tokens`, `completion_tokens`, `text`, `token_ids` (a token that ended the
output included) and `finish_reason`: `stop` or `length`. A chat has `message` in place of `text`
(`content`, `reasoning_content`, `tool_calls`), and `tool_calls` may be its finish reason; stop
strings are searched behind the reasoning. With `n` above 1, `choices` hold what belongs to one
output. `logprobs` and `prompt_logprobs` are lists of `token_id`, `token`, `logprob` and `top`. A
line that could not be run has `id`, `line` (from 1) and `error` with `code` (a name from the table
below) and `message`.

The result of a batch line is OpenAI's: `id`, `custom_id`, `response` with `status_code`,
`request_id` and `body`, and `error`, one of the last two null. An error has `code`, `message`,
`param` and `line`. Ids are digests of the request; `created` is 0.

Results come in the order of the input; with `--output-order completion` as they are ready. They
depend on request, model and configuration alone. The exit code is 0 when every line has its result,
error records included; their number is the last line on stderr. Ctrl-C and SIGTERM end with 130 and
keep what was finished.

`--validate` reads the input without a model, writes an error record for each bad line and ends with
1 if there is one. What only the model knows, such as the length of a prompt, is not checked.
`--plan` also encodes: it needs `config.json` and `tokenizer.json`, counts every output at its
longest, and estimates steps from the limits alone.

`runtime.score` writes tensors: `<id>.logprobs` float32 [T - 1], with `--full-logits`
`<id>.logits` float32 [T, vocab], with `--taps` `<id>.taps.*` by the names of
`tests/golden/README.md`.

## Report of `--json`

One object: `schema`, `config` (resolved), `environment`, `results`. Results of `runtime.offline`
hold counts and rates in tokens per second, prefill and decode apart, `time_to_first_token_s`,
seconds by phase of the start, `peak_memory_bytes`, the memory plan and `counters`: `traces`,
`compiles`, `jit` (compiled during the job), `captures`, `replays`, `graph_misses` (steps without
a graph). The end of a name is its unit.
"""

ENVIRONMENT_INTRO = """\
# Environment variables

Read by the commands only, never by the library. A variable with the prefix that is not in this
table is an error, and so is a value of the wrong form.
"""

OPS_INTRO = """\
# Ops

The vocabulary of graphs, from the registry (`graphs/op.py`). The body of an op, in the file named
here, is its definition; another implementation may differ from it by the tolerance (absolute,
relative), and *exact* means the same bits. A change of the version changes the key of every
compiled unit that holds the op. Sections of *model.md* belong to the architecture's
specification.
"""


def cli_document() -> str:
    """Return the text of `cli.md`."""
    parts = [CLI_INTRO]
    parts += [command_section(make()) for make in PARSERS]
    codes = table(("code", "meaning"), EXIT_CODES)
    parts += ["## Exit codes\n\n" + codes, CLI_FORMS, "## Errors\n\n" + error_table()]
    return document(parts)


def command_section(parser: CommandParser) -> str:
    """Return what `--help` says about a command, as Markdown."""
    parts = [f"## `{parser.prog}`", cell(parser.description or "")]
    for group in parser._action_groups:  # argparse has no public way to list its flags
        rows = [
            (flag_cell(action), cell(action.help or ""))
            for action in group._group_actions
            if action.option_strings != ["-h", "--help"]
        ]
        if rows:
            title = group.title or ""
            parts += [f"### {title[:1].upper()}{title[1:]}", table(("flag", "meaning"), rows)]
    examples = [line.strip() for line in (parser.epilog or "").splitlines()[1:]]
    parts.append("```sh\n" + "\n".join(examples) + "\n```")
    return "\n\n".join(part.strip() for part in parts) + "\n"


def flag_cell(action: argparse.Action) -> str:
    """Return a flag with the form of its value."""
    form = "" if action.nargs == 0 else f" {action.metavar}"
    if action.nargs == "?":
        form = f" [{action.metavar}]"
    return cell(f"`{action.option_strings[-1]}{form}`")


def error_table() -> str:
    """Return every error with a message of its own: name, exit code, what it is about."""
    for name in ERROR_MODULES:
        importlib.import_module(name)
    errors = sorted(set(subclasses(EngineError)), key=lambda cls: (cls.__module__, cls.__name__))
    rows = [
        (f"`{cls.__name__}`", cls.__module__.split(".")[0], str(cls.exit_code), summary(cls))
        for cls in errors
        if "message" in vars(cls) and cls.__module__ in ERROR_MODULES
    ]
    return (
        "What concerns one line of an input becomes that line's error record; the exit code counts "
        "where\nthe error ends the command.\n\n"
        + table(("code", "package", "exit code", "what it is"), rows)
    )


def subclasses(cls: type[EngineError]) -> Iterator[type[EngineError]]:
    """Yield all classes below one."""
    for child in cls.__subclasses__():
        yield child
        yield from subclasses(child)


def environment_document() -> str:
    """Return the text of `environment.md`."""
    return document([ENVIRONMENT_INTRO, environment_table()])


def ops_document() -> str:
    """Return the text of `ops.md`."""
    import graphs.ops  # noqa: F401 - registers the ops
    from graphs.op import EXACT, OPS

    overview, details = [], []
    for name, op in sorted(OPS.items()):
        tolerance = f"{op.tolerance.atol:g}, {op.tolerance.rtol:g}"
        tolerance = "exact" if op.tolerance == EXACT else tolerance
        home = op.reference.__module__.replace(".", "/") + ".py"
        mutates = ", ".join(f"`{argument}`" for argument in op.mutates) or "nothing"
        overview.append((f"[`{name}`](#{name})", f"`{home}`", mutates, tolerance, str(op.version)))
        details.append(
            f"## `{name}`\n\n{summary(op.reference)}\n\n```text\n{name}{op.schema}\n```\n"
            + source(op.reference)
        )
    columns = ("op", "file", "writes", "tolerance", "version")
    return document([OPS_INTRO, table(columns, overview), *details])


def summary(thing: object) -> str:
    """Return the first sentence of a docstring on one line."""
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())


def source(thing: object) -> str:
    """Return the `Source:` entry of a docstring as a paragraph, or nothing."""
    text = inspect.getdoc(thing) or ""
    found = re.search(r"^Source: (.*(?:\n +.*)*)", text, re.MULTILINE)
    return f"\nSource: {' '.join(found[1].split())}\n" if found else ""


def cell(text: str) -> str:
    """Escape what Markdown would take for its own; argparse doubles percent signs."""
    return text.replace("%%", "%").replace("|", "\\|").replace("<", "\\<")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def document(parts: Iterable[str]) -> str:
    """Join blocks by blank lines, the note behind the title."""
    title, _, rest = "\n\n".join(part.strip() for part in parts).partition("\n\n")
    return f"{title}\n\n{NOTE}\n\n{rest}\n"


DOCUMENTS = {
    "cli.md": cli_document,
    "environment.md": environment_document,
    "ops.md": ops_document,
}


def stale(directory: Path = HERE) -> list[str]:
    """Return the names of the documents that differ from what would be written."""
    paths = {name: directory / name for name in DOCUMENTS}
    return [
        name
        for name, path in paths.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != DOCUMENTS[name]()
    ]


def main(argv: Sequence[str]) -> int:
    """Run the script and return its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    args = parser.parse_args(argv)
    names = stale()
    if args.check:
        for name in names:
            sys.stderr.write(f"docs/{name} is out of date: run python docs/generate.py\n")
        return 1 if names else 0
    for name in names:
        (HERE / name).write_text(DOCUMENTS[name](), encoding="utf-8")
        sys.stderr.write(f"wrote docs/{name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
