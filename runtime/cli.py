"""What every command shares: flags, configuration files, the JSON report, exit codes.

Flags are generated from the fields of EngineConfig and SamplingParams. A value comes from, in
rising order: the default, the environment (num_threads only), the `--config` file, the flag.
Importing this module stays cheap; nothing here loads torch.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import signal
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from graphs.errors import EngineError
from runtime.config import Decision, EngineConfig, SamplingParams
from runtime.env import EnvSettings
from runtime.errors import (
    BadArguments,
    ConfigFileSyntax,
    ConfigFileUnreadable,
    OutputUnwritable,
    StdoutTaken,
    UnknownField,
    UnknownFlag,
)
from runtime.fields import (
    fields_by_name,
    flag_of,
    kind_of,
    nearest,
    parse_text,
    show,
    values_as_mapping,
    values_from_mapping,
)
from runtime.log import LEVELS

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_MACHINE, EXIT_ARTIFACT, EXIT_INTERRUPTED = (
    0,
    1,
    2,
    3,
    4,
    130,
)
_SAMPLING_TABLE = "sampling"  # of a configuration file; the other keys are EngineConfig's
_METAVARS = {
    "int": "N",
    "float": "X",
    "bool": "on|off",
    "str": "TEXT",
    "ints": "ID,ID",
    "strs": "TEXT",
    "biases": "ID=X,ID=X",
}


class CommandParser(argparse.ArgumentParser):
    """An argument parser that raises our errors instead of printing and leaving.

    Args:
        prog: how the user calls the command, such as "python -m runtime.offline".
        description: what it does, a sentence or two.
        examples: complete command lines, shown at the end of the help.
    """

    def __init__(self, *, prog: str, description: str, examples: Sequence[str] = ()) -> None:
        super().__init__(
            prog=prog,
            usage=f"{prog} [flag ...]",
            description=description,
            epilog="\n".join(("examples:", *(f"  {line}" for line in examples)))
            if examples
            else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Raise what argparse found wrong as one line."""
        raise BadArguments(prog=self.prog, detail=message)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, refusing unknown arguments with the nearest flags.

        Raises:
            UnknownFlag, BadArguments: the command line cannot be read.
            FieldTypeError, FieldRangeError, FieldChoiceError: a value breaks the rule of its field.
        """
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings]
            known = [flag for flag in flags if flag.startswith("--")]
            name = unknown[0].partition("=")[0]
            hint = nearest(name, known, prefix="--", or_all=False)
            raise UnknownFlag(prog=self.prog, argument=name, nearest=hint and hint + " ")
        return parsed


def add_config_flags(parser: argparse.ArgumentParser, cls: type, title: str) -> None:
    """Add a flag for every field of a settings class that is marked as one.

    Args:
        parser: gets an argument group.
        cls: EngineConfig or SamplingParams.
        title: heading of the group in the help.
    """
    group = parser.add_argument_group(title)
    for field in fields_by_name(cls).values():
        if not field.metadata["flag"]:
            continue
        flag, (kind, _) = flag_of(field), kind_of(field)
        # `--ignore-eos` alone means on; what is on by default needs the word.
        extra: dict[str, Any] = {}
        if kind == "bool" and field.default is False:
            extra = {"nargs": "?", "const": True}
        if kind == "strs":
            extra = {"action": "extend"}  # the reader makes a tuple of one
        group.add_argument(
            flag,
            dest=_dest(cls, field.name),
            type=_reader(field, flag),
            default=argparse.SUPPRESS,
            metavar="|".join(field.metadata["choices"]) or _METAVARS[kind],
            help=_help(field),
            **extra,
        )


def add_common_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of every command: --config, --dump-config, --json, --quiet, --log-level."""
    group = parser.add_argument_group("reports")
    group.add_argument(
        "--config",
        dest="config_file",
        metavar="FILE.toml",
        help="read settings from a TOML file; flags win",
    )
    group.add_argument(
        "--dump-config",
        action="store_true",
        help="print the settings as TOML, with reasons, and end",
    )
    group.add_argument(
        "--json",
        dest="json_path",
        metavar="PATH|-",
        help="write a report as one JSON object; - is stdout",
    )
    group.add_argument("--quiet", action="store_true", help="no progress, only warnings in the log")
    group.add_argument(
        "--log-level",
        choices=LEVELS,
        metavar="|".join(LEVELS),
        help="how much to log to stderr (default: FLASHREPLAY_LOG_LEVEL, or info)",
    )


def load_config(
    args: argparse.Namespace, env: EnvSettings | None = None
) -> tuple[EngineConfig, SamplingParams]:
    """Build both configurations from defaults, environment, `--config` file and flags.

    Args:
        args: what a parser with `add_common_flags` and `add_config_flags` returned.
        env: what `read_environment` returned.
    Returns:
        the engine's configuration, unresolved; the sampling defaults.
    Raises:
        ConfigFileUnreadable, ConfigFileSyntax, UnknownField: the file.
        FieldTypeError, FieldRangeError, FieldChoiceError, FieldConflict: a value.
    """
    engine: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    if env is not None and env.num_threads is not None:
        engine["num_threads"] = env.num_threads
    if args.config_file is not None:
        from_file, sampling_from_file = read_config_file(Path(args.config_file))
        engine |= from_file
        sampling |= sampling_from_file
    engine |= _given(args, EngineConfig)
    sampling |= _given(args, SamplingParams)
    return EngineConfig(**engine), SamplingParams(**sampling)


def read_config_file(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a configuration file.

    Args:
        path: TOML; top-level keys are fields of EngineConfig, the table [sampling] has fields of
            SamplingParams.
    Returns:
        values for EngineConfig, values for SamplingParams.
    Raises:
        ConfigFileUnreadable, ConfigFileSyntax: the file as such.
        UnknownField, FieldTypeError, FieldRangeError, FieldChoiceError: a key or value in it.
    """
    try:
        raw = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise ConfigFileUnreadable(path=path, reason=error.strerror) from error
    except ValueError as error:  # not UTF-8, or not TOML
        raise ConfigFileSyntax(path=path, reason=error) from error
    table = raw.pop(_SAMPLING_TABLE, {})
    known = fields_by_name(EngineConfig)
    for name, value in raw.items():
        if name not in known:
            choices = [*known, f"[{_SAMPLING_TABLE}]"]
            hint = nearest(name, choices)
            if name in fields_by_name(SamplingParams):
                hint = f"It belongs into the table [{_SAMPLING_TABLE}]."
            raise UnknownField(where=f"file {path}", field=name, nearest=hint)
        if isinstance(value, dict):
            raise UnknownField(
                where=f"file {path}", field=f"[{name}]", nearest=f"'{name}' is no table."
            )
    if not isinstance(table, dict):
        raise ConfigFileSyntax(
            path=path, reason=f"'{_SAMPLING_TABLE}' is {show(table)}, not a table"
        )
    return (
        values_from_mapping(EngineConfig, raw, f"file {path}"),
        values_from_mapping(SamplingParams, table, f"file {path}, [{_SAMPLING_TABLE}]"),
    )


def dump_config(
    config: EngineConfig, sampling: SamplingParams | None = None, decisions: Sequence[Decision] = ()
) -> str:
    """Return settings as TOML that `--config` reads back; reasons of decisions are comments."""
    reasons = {decision.field: decision.reason for decision in decisions}
    lines = _toml_lines(config, reasons)
    if sampling is not None:
        lines += ["", f"[{_SAMPLING_TABLE}]", *_toml_lines(sampling, {})]
    return "\n".join(lines) + "\n"


def environment(num_threads: int | None = None) -> dict[str, Any]:
    """Describe versions and machine for a report, without importing torch.

    Args:
        num_threads: threads in use, if known.
    """
    return {
        "python": platform.python_version(),
        "torch": _version("torch"),
        "flashreplay": _version("flashreplay"),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cores": available_cores(),
        "num_threads": num_threads,
    }


def available_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def report(
    schema: str,
    config: EngineConfig,
    results: Mapping[str, Any],
    sampling: SamplingParams | None = None,
) -> dict[str, Any]:
    """Return the object that `--json` writes.

    Args:
        schema: name and version of the form of `results`, such as "flashreplay.offline/1".
        config: the resolved configuration.
        results: JSON values.
        sampling: the sampling defaults, if the command samples.
    """
    settings = values_as_mapping(config)
    if sampling is not None:
        settings[_SAMPLING_TABLE] = values_as_mapping(sampling)
    return {
        "schema": schema,
        "config": settings,
        "environment": environment(config.num_threads),
        "results": dict(results),
    }


def write_json(path: str, document: Mapping[str, Any]) -> None:
    """Write a JSON object to a file, which appears only when complete, or to stdout for "-".

    Raises:
        OutputUnwritable: the file cannot be written.
    """
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    if path == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        write_atomic(Path(path), text.encode())
    except OSError as error:
        raise OutputUnwritable(path=path, reason=error.strerror, flag="--json") from error


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a file by rename, so that nobody sees a part; write a device or pipe directly."""
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def check_targets(
    targets: Mapping[str, str | None], sources: Mapping[str, str | None] | None = None
) -> None:
    """Refuse two outputs to one place, an output over an input, and a place that cannot be.

    Args:
        targets: flag to path; "-" is stdout, None means that the flag was not given.
        sources: flag to path of what is read, likewise.
    Raises:
        StdoutTaken: two flags name the same stream or file.
        OutputUnwritable: the folder does not exist or refuses new files.
    """
    for flag, path in targets.items():
        folder = os.path.dirname(os.path.realpath(path)) if path not in (None, "-") else None
        if folder is not None and not os.path.isdir(folder):
            raise OutputUnwritable(path=path, reason="no such folder", flag=flag)
        if folder is not None and not os.access(folder, os.W_OK):
            raise OutputUnwritable(path=path, reason="the folder is read-only", flag=flag)
    seen: dict[str, str] = {
        os.path.realpath(path): flag
        for flag, path in (sources or {}).items()
        if path not in (None, "-")
    }
    for flag, path in targets.items():
        if path is None:
            continue
        key = path if path == "-" else os.path.realpath(path)
        if key in seen and key != os.devnull:
            target = "stdout" if path == "-" else path
            raise StdoutTaken(first=seen[key], second=flag, target=target)
        seen[key] = flag


def run_main(main: Callable[[Sequence[str]], int], argv: Sequence[str] | None = None) -> int:
    """Run a command and turn what it raises into one line on stderr and an exit code.

    Args:
        main: takes the arguments, returns the exit code.
        argv: arguments without the program name, by default those of the process.
    Returns:
        the exit code: 0 done, 1 failed, 2 usage, 3 this machine cannot, 4 artifact does not match,
            130 interrupted.
        A reader that closes stdout early counts as failed.
    """
    try:
        if sys.stdout is None:  # closed before the start
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - as long as the process
            _say("stdout is closed; it is where results go")
            return EXIT_FAILED
        code = main(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except EngineError as error:
        _say(" ".join(str(error).split("\n")))
        return error.exit_code
    except KeyboardInterrupt:
        _say("interrupted; finished results are kept")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _silence_stdout()
        _say("stdout was closed before everything was written")
        return EXIT_FAILED
    except OSError as error:  # files of ours have their own errors: this is a standard stream
        _silence_stdout()
        _say(f"a standard stream cannot be written: {error.strerror or error}")
        return EXIT_FAILED
    return code


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Hold back Ctrl-C inside the block, where imports would break in the middle.

    It is raised at the end of the block.
    """
    pressed = False

    def remember(_number: int, _frame: object) -> None:
        nonlocal pressed
        pressed = True

    before = signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def _say(line: str) -> None:
    with contextlib.suppress(OSError, AttributeError):  # a closed stderr is nobody's loss
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


def _silence_stdout() -> None:
    # The interpreter flushes stdout once more when it ends and would complain there.
    with contextlib.suppress(OSError, ValueError):
        target = sys.stdout.fileno()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, target)
        os.close(null)


def _dest(cls: type, name: str) -> str:
    return f"{cls.__name__}.{name}"


def _given(args: argparse.Namespace, cls: type) -> dict[str, Any]:
    given = vars(args)
    return {
        name: given[_dest(cls, name)] for name in fields_by_name(cls) if _dest(cls, name) in given
    }


def _reader(field: "dataclasses.Field[Any]", flag: str) -> Callable[[str], Any]:
    return lambda text: parse_text(field, text, flag)


def _help(field: "dataclasses.Field[Any]") -> str:
    default = field.default
    if default is None:
        text = field.metadata["none"]
    elif isinstance(default, bool):
        text = "on" if default else "off"
    else:
        text = "none" if default == () else str(default)
    unit = f"unit: {field.metadata['unit']}, " if field.metadata["unit"] else ""
    return f"{field.metadata['help']} ({unit}default: {text})".replace("%", "%%")


def _toml_lines(settings: Any, reasons: Mapping[str, str]) -> list[str]:
    lines = []
    values = values_as_mapping(settings)
    for name, field in fields_by_name(type(settings)).items():
        value = values[name]
        reason = reasons.get(name)
        if value is None:
            lines.append(f"# {name}: {field.metadata['none']}")
        else:
            lines.append(f"{name} = {_toml_value(value)}" + (f"  # {reason}" if reason else ""))
    return lines


def _toml_value(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, dict):  # keys are digits, which TOML takes bare
        return "{" + ", ".join(f"{key} = {_toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str):
        # A TOML basic string is a JSON string, but for the delete character and surrogate pairs.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower()


def _version(distribution: str) -> str | None:
    from importlib import metadata  # deferred: it costs more than the rest of this module

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in (
            Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        ):
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
