"""The few environment variables, read strictly and in one place.

Only entry modules call `read_environment`; library code takes arguments. `EnvSettings` is the
table: a variable is a field of it, spelled FLASHREPLAY_ and the field name in capitals, and
`environment_table` prints it for the documents.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from runtime.errors import BackendUnavailable, BadVariable, UnknownVariable, UsageError
from runtime.fields import fields_by_name, kind_of, nearest, parse_text, setting

PREFIX = "FLASHREPLAY_"
AVAILABLE_BACKENDS = ("cpu",)
_WHY_NOT = {
    "cuda": "no CUDA graph backend is part of this version",
    "ascend": "no Ascend graph backend is part of this version",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvSettings:
    """What the environment may say; None or the default where it is silent."""

    log_level: str | None = setting(
        None,
        choices=("debug", "info", "warning", "error"),
        help="log level where --log-level is not given",
        none="info",
    )
    backend: str = setting(
        "cpu",
        choices=("cpu", "cuda", "ascend"),
        help="device backend; another one than cpu ends with exit code 3",
    )
    num_threads: int | None = setting(
        None,
        unit="threads",
        minimum=1,
        maximum=4096,
        help="num_threads where neither the configuration file nor --num-threads gives it",
        none="as in --help",
    )


def variable_name(field_name: str) -> str:
    """Return the environment variable of a field of `EnvSettings`."""
    return PREFIX + field_name.upper()


def read_environment(environ: Mapping[str, str]) -> EnvSettings:
    """Read every variable with our prefix.

    Args:
        environ: usually os.environ.
    Returns:
        the settings; fields whose variable is unset keep their default.
    Raises:
        UnknownVariable: a variable with the prefix that is not in the table; the nearest names are
            given.
        BadVariable: a value of the wrong form, an empty one included.
        BackendUnavailable: a backend that this version does not have (exit code 3).
    """
    fields = fields_by_name(EnvSettings)
    by_variable = {variable_name(name): field for name, field in fields.items()}
    values = {}
    for name in sorted(environ):
        if not name.startswith(PREFIX):
            continue
        if name not in by_variable:
            raise UnknownVariable(name=name, nearest=nearest(name, by_variable, prefix=PREFIX))
        field = by_variable[name]
        try:
            values[field.name] = parse_text(field, environ[name], name)
        except UsageError as error:
            raise BadVariable(
                name=name, value=ascii(environ[name]), expected=_expected(field)
            ) from error
    settings = EnvSettings(**values)
    check_backend(settings.backend, variable_name("backend"))
    return settings


def check_backend(name: str, source: str) -> None:
    """Refuse a backend that this version does not run on.

    Args:
        name: backend name.
        source: the variable or flag that asked for it.
    Raises:
        BackendUnavailable: exit code 3, with the reason.
    """
    if name not in AVAILABLE_BACKENDS:
        raise BackendUnavailable(
            name=name,
            source=source,
            reason=_WHY_NOT.get(name, "no such backend is known"),
            available=", ".join(AVAILABLE_BACKENDS),
        )


def environment_table() -> str:
    """Return the table of variables as Markdown; docs/environment.md holds it."""
    lines = ["| variable | values | default | meaning |", "|---|---|---|---|"]
    for name, field in fields_by_name(EnvSettings).items():
        default = field.metadata["none"] if field.default is None else field.default
        lines.append(
            f"| `{variable_name(name)}` | {_expected(field)} | {default} "
            f"| {field.metadata['help']} |"
        )
    return "\n".join(lines) + "\n"


def _expected(field: "dataclasses.Field[object]") -> str:
    choices = field.metadata["choices"]
    if choices:
        return "one of " + ", ".join(choices)
    kind, _ = kind_of(field)
    bounds = f" from {field.metadata['minimum']} to {field.metadata['maximum']}"
    return {"int": "an integer", "float": "a number"}[kind] + bounds
