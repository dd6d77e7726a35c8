"""Read one JSON object into the fields of a frozen dataclass, strictly.

Nothing is coerced: a bool is no int, an int field takes no float and no string. A key that is
neither a field nor one of the documented exceptions is an error, because a misspelt key would
silently change the model.
"""

import dataclasses
import difflib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from model.errors import (
    ConfigNotFound,
    ConfigSyntax,
    MissingConfigKey,
    UnknownConfigKey,
    UnsupportedConfigValue,
    WrongConfigType,
)

# Keys that published configs carry and that have no meaning for the forward. They pass with any
# value.
IGNORED_KEYS = frozenset(
    {
        "_name_or_path",
        "auto_map",
        "chunk_size_feed_forward",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "return_dict",
        "torch_dtype",  # the older name of `dtype`; the storage type is read from the weight files
        "transformers_version",
        "use_cache",
    }
)


class DataclassType(Protocol):
    """The type of a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """What a config value must look like.

    Args:
        kind: "int", "float", "bool", "str", or "ints" and "strs" for lists of them.
        minimum: smallest int allowed, of each element for "ints".
        maximum: largest int allowed; ids and sizes fit in int32, counts that loops run over are far
            below.
        above: a float must be greater than this.
        choices: the only values allowed; empty = any.
        is_nullable: whether null is allowed.
    """

    kind: str
    minimum: int = 0
    maximum: int = 2**31 - 1
    above: float = -math.inf
    choices: tuple[Any, ...] = ()
    is_nullable: bool = False


_NAMES = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "ints": "a list of integers",
    "strs": "a list of strings",
}
_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
}


def config_field(text: str, kind: str, *, default: Any = dataclasses.MISSING, **limits: Any) -> Any:
    """Declare a config field with its one-line help and its `FieldSpec`."""
    metadata = {"help": text, "spec": FieldSpec(kind, **limits)}
    return field(default=default, metadata=metadata)


def fixed_field(text: str, kind: str, value: Any) -> Any:
    """Declare a field that may be absent and otherwise must hold `value`."""
    return config_field(text, kind, default=value, choices=(value,))


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds one object without repeated keys.

    Raises:
        ConfigNotFound: the file cannot be read.
        ConfigSyntax: it is not JSON, not an object, or repeats a key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigNotFound(path=path, detail=error.strerror or type(error).__name__) from error
    except UnicodeDecodeError as error:
        raise ConfigSyntax(source=path, detail=f"not UTF-8 at byte {error.start}") from error
    try:
        raw = json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise ConfigSyntax(source=path, detail=str(error)) from error
    if not isinstance(raw, dict):
        raise ConfigSyntax(source=path, detail=f"it holds {_describe(raw)}")
    return raw


def read_fields(
    cls: type[DataclassType],
    raw: object,
    *,
    source: str,
    where: str,
    nested: Collection[str] = (),
    fixed: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Check one JSON object against the fields of a dataclass and return the constructor arguments.

    Args:
        cls: dataclass whose fields were declared with `config_field`.
        raw: the parsed JSON value.
        source: file name for messages.
        where: dotted path of the object for messages, "" for the root.
        nested: names of fields that the caller reads itself.
        fixed: keys without a field that pass at exactly this value.
    Raises:
        WrongConfigType, UnknownConfigKey, MissingConfigKey, UnsupportedConfigValue.
    """
    if not isinstance(raw, dict):
        raise WrongConfigType(source=source, key=where, expected="an object", got=_describe(raw))
    declared = {f.name: f for f in dataclasses.fields(cls)}
    fixed = fixed or {}
    _refuse_unknown(raw, {*declared, *nested, *fixed}, source, where)
    required = [
        name for name, f in declared.items() if f.default is dataclasses.MISSING and name not in raw
    ]
    if required:
        names = ", ".join(f"'{name}'" for name in required)
        raise MissingConfigKey(source=source, where=where or "the root object", keys=names)
    for key, value in fixed.items():
        if key in raw and not _same(raw[key], value):
            raise UnsupportedConfigValue(
                source=source,
                key=_join(where, key),
                expected=json.dumps(value),
                got=json.dumps(raw[key]),
                hint="Other values are a different model; remove the key or use this value.",
            )
    return {
        name: _read_value(raw[name], f.metadata["spec"], source, _join(where, name))
        for name, f in declared.items()
        if name not in nested and name in raw
    }


def _read_value(value: Any, spec: FieldSpec, source: str, key: str) -> Any:
    if value is None and spec.is_nullable:
        return None
    if spec.kind in ("ints", "strs"):
        if not isinstance(value, list):
            raise WrongConfigType(
                source=source, key=key, expected=_NAMES[spec.kind], got=_describe(value)
            )
        element = dataclasses.replace(spec, kind=spec.kind[:-1], choices=())
        items = tuple(_read_value(v, element, source, f"{key}[{i}]") for i, v in enumerate(value))
        _check_choices(items, spec, source, key)
        return items
    # bool is a subclass of int in Python but not in JSON, hence type() and not isinstance().
    if type(value) not in _TYPES[spec.kind]:
        raise WrongConfigType(
            source=source, key=key, expected=_NAMES[spec.kind], got=_describe(value)
        )
    if spec.kind == "float":
        value = float(value)
        _check_float(value, spec, source, key)
    if spec.kind == "int" and value < spec.minimum:
        _refuse_value(source, key, f"at least {spec.minimum}", value)
    if spec.kind == "int" and value > spec.maximum:
        _refuse_value(source, key, f"at most {spec.maximum}", value)
    _check_choices(value, spec, source, key)
    return value


def _check_float(value: float, spec: FieldSpec, source: str, key: str) -> None:
    if not math.isfinite(value):
        _refuse_value(source, key, "a finite number", value)
    if value <= spec.above:
        _refuse_value(source, key, f"above {spec.above:g}", value)


def _check_choices(value: Any, spec: FieldSpec, source: str, key: str) -> None:
    if spec.choices and value not in spec.choices:
        _refuse_value(
            source, key, " or ".join(json.dumps(choice) for choice in spec.choices), value
        )


def _refuse_value(source: str, key: str, expected: str, value: Any) -> None:
    raise UnsupportedConfigValue(
        source=source,
        key=key,
        expected=expected,
        got=json.dumps(value),
        hint="Only this architecture is implemented; check that the file belongs to the model.",
    )


def _refuse_unknown(raw: dict[str, Any], known: set[str], source: str, where: str) -> None:
    unknown = [key for key in raw if key not in known and key not in IGNORED_KEYS]
    if not unknown:
        return
    parts = []
    for key in unknown:
        nearest = difflib.get_close_matches(key, sorted(known), n=3, cutoff=0.5)
        parts.append(f"unknown key '{key}' (nearest: {', '.join(nearest) or 'none'})")
    raise UnknownConfigKey(source=source, where=where or "the root object", keys="; ".join(parts))


class _RepeatedKey(ValueError):
    def __init__(self, key: str) -> None:
        super().__init__(f"key '{key}' appears twice in one object")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _RepeatedKey(key)
            seen.add(key)
    return result


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    return bool(left == right)


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _describe(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
