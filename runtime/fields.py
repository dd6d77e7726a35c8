"""Settings as dataclass fields: type, default, unit, rule and help stand in one place, everything
else reads them.

Flags, configuration files, environment variables, JSON lines and the documentation are all
generated from the metadata that `setting` attaches; `check_fields` enforces it on construction.
"""

import dataclasses
import difflib
import functools
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from runtime.errors import FieldChoiceError, FieldRangeError, FieldTypeError, UnknownField

_NAMES = {
    "int": "an integer",
    "float": "a number",
    "bool": "on or off",
    "str": "a string",
    "ints": "a list of integers",
    "strs": "a string or a list of strings",
    "biases": "token ids with a number each",
}
_ELEMENTS = {"ints": "int", "strs": "str", "biases": "float"}  # kinds that hold several values
_ON = {"on": True, "off": False}
_INF = math.inf
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")  # as the key of an object, where it is text
_MAX_TOKEN_ID = 2**31 - 1


def setting(
    default: Any,
    *,
    help: str,  # noqa: A002 - the word argparse uses for the same thing
    unit: str = "",
    flag: bool = False,
    flag_name: str = "",
    choices: tuple[str, ...] = (),
    minimum: float = -_INF,
    maximum: float = _INF,
    may_be_empty: bool = True,
    max_items: int | None = None,
    none: str = "",
) -> Any:
    """Declare a dataclass field with everything that a user may want to know about it.

    Args:
        default: the default; None where the value is computed later.
        help: one line, no full stop.
        unit: unit of the value, empty where there is none.
        flag: whether the field is a command-line flag.
        flag_name: flag spelling without dashes where it differs from the field name.
        choices: the words a string may be.
        minimum: least number, inclusive (of each element for a tuple, of each number for biases).
        maximum: greatest number, inclusive.
        may_be_empty: whether a tuple may have no element.
        max_items: greatest length of a tuple; None for no limit.
        none: what None means, for the help text.
    Returns:
        a dataclass field; typed Any so that the annotation of the class decides.
    """
    metadata = {
        "help": help,
        "unit": unit,
        "flag": flag,
        "flag_name": flag_name,
        "choices": choices,
        "minimum": minimum,
        "maximum": maximum,
        "may_be_empty": may_be_empty,
        "max_items": max_items,
        "none": none,
    }
    return dataclasses.field(default=default, metadata=metadata)


@functools.cache  # asked for every field of every line of a job
def kind_of(field: dataclasses.Field[Any]) -> tuple[str, bool]:
    """Return the kind of a field and whether it may be None.

    Kinds: int, float, bool, str; ints and strs for tuples of them; biases for tuples of (token id,
    number).
    """
    annotation: Any = field.type
    is_optional = False
    if isinstance(annotation, types.UnionType):
        (annotation,) = (a for a in typing.get_args(annotation) if a is not types.NoneType)
        is_optional = True
    if typing.get_origin(annotation) is tuple:
        element = typing.get_args(annotation)[0]
        return {int: "ints", str: "strs"}.get(element, "biases"), is_optional
    return str(annotation.__name__), is_optional


def flag_of(field: dataclasses.Field[Any]) -> str:
    """Return the command-line spelling of a field, or an empty string if it is no flag."""
    if not field.metadata["flag"]:
        return ""
    return "--" + (field.metadata["flag_name"] or field.name.replace("_", "-"))


def show(value: Any) -> str:
    """Return the value for a message, cut to a length that keeps it on one line."""
    if isinstance(value, int) and value.bit_length() > 256:  # Python refuses to print huge ones
        return f"an integer of {value.bit_length()} bits"
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


def nearest(name: str, known: Iterable[str], *, prefix: str = "", or_all: bool = True) -> str:
    """Return a sentence with the known names closest to `name`, or all where none is close.

    A prefix that all names share is left out of the comparison: it must not make them alike.
    """
    names = sorted(known)
    shorter = [known_name.removeprefix(prefix) for known_name in names]
    close = difflib.get_close_matches(name.removeprefix(prefix), shorter, n=3, cutoff=0.5)
    if close:
        return f"Did you mean {' or '.join(prefix + match for match in close)}?"
    return f"Known: {', '.join(names)}." if or_all else ""


def fields_by_name(cls: type) -> Mapping[str, dataclasses.Field[Any]]:
    """Return the fields of a settings class in order of declaration."""
    return _fields_by_name(cls)


@functools.cache
def _fields_by_name(cls: type) -> Mapping[str, dataclasses.Field[Any]]:
    return types.MappingProxyType({field.name: field for field in dataclasses.fields(cls)})


def check_fields(instance: Any, where: str) -> None:
    """Check every field of a settings object against its declaration.

    Args:
        instance: a dataclass whose fields were made by `setting`.
        where: how messages name the object.
    Raises:
        FieldTypeError, FieldRangeError, FieldChoiceError: the first field that breaks its rule.
    """
    for name, field in fields_by_name(type(instance)).items():
        value = getattr(instance, name)
        if value is not field.default:  # which is right by declaration
            check_value(field, value, where)


def check_value(field: dataclasses.Field[Any], value: Any, where: str) -> None:
    """Check one value against the declaration of its field; see `check_fields`."""
    kind, is_optional = kind_of(field)
    if value is None and is_optional:
        return
    if kind not in _ELEMENTS:
        _check_scalar(field, value, kind, where)
        return
    elements = _elements(field, value, kind, where)
    for element in elements:
        _check_scalar(field, element, _ELEMENTS[kind], where)
        if kind == "strs" and not is_text(element):
            raise_range(field, element, where, "no half of a surrogate pair")
    most = field.metadata["max_items"]
    if most is not None and len(elements) > most:
        raise_range(field, value, where, f"at most {most} entries, not {len(elements)}")
    if not elements and not field.metadata["may_be_empty"]:
        raise_range(field, value, where, "not empty")


def _elements(field: dataclasses.Field[Any], value: Any, kind: str, where: str) -> list[Any]:
    """Return the values of which each must obey the rule of the field."""
    if kind == "biases":
        return [bias for _, bias in _bias_pairs(field, value, where)]
    if kind == "strs" and isinstance(value, str):
        return [value]
    if not isinstance(value, tuple | list):
        raise_type(field, value, where)
    return list(value)


def _bias_pairs(field: dataclasses.Field[Any], value: Any, where: str) -> list[tuple[int, Any]]:
    """Return the pairs of an object, whose keys JSON makes text, or of the form we store."""
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, tuple) and all(isinstance(p, tuple) and len(p) == 2 for p in value):
        items = list(value)
    else:
        raise_type(field, value, where)
    pairs = []
    for key, bias in items:
        token_id = int(key) if isinstance(key, str) and _TOKEN_ID.fullmatch(key) else key
        if type(token_id) is not int:
            raise_type(field, key, where)
        if not 0 <= token_id <= _MAX_TOKEN_ID:
            raise_range(field, key, where, f"token ids from 0 to {_MAX_TOKEN_ID}")
        pairs.append((token_id, bias))
    if len(dict(pairs)) != len(pairs):
        raise_range(field, value, where, "each token id once")
    return pairs


def is_text(value: str) -> bool:
    """Whether a string can be encoded: JSON can spell half of a surrogate pair, files cannot."""
    return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)


def as_stored(field: dataclasses.Field[Any], value: Any) -> Any:
    """Return a checked value as the settings object holds it: hashable, numbers of their kind."""
    kind, _ = kind_of(field)
    if value is None:
        return None
    if kind == "float":
        return float(value)
    if kind == "biases":
        return tuple(sorted((i, float(bias)) for i, bias in _bias_pairs(field, value, field.name)))
    if kind == "strs" and isinstance(value, str):
        return (value,)
    return tuple(value) if kind in _ELEMENTS else value


def _check_scalar(field: dataclasses.Field[Any], value: Any, kind: str, where: str) -> None:
    # isinstance would let True pass for 1.
    accepted = {"int": (int,), "float": (float, int), "bool": (bool,), "str": (str,)}[kind]
    if type(value) not in accepted:
        raise_type(field, value, where)
    if kind == "str":
        _check_text(field, value, where)
    elif kind != "bool":
        low, high = field.metadata["minimum"], field.metadata["maximum"]
        if not (low <= value <= high and _is_finite(value)):
            raise_range(field, value, where, rule_of(field))


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


def _check_text(field: dataclasses.Field[Any], value: str, where: str) -> None:
    choices = field.metadata["choices"]
    if choices and value not in choices:
        raise FieldChoiceError(
            where=where,
            field=field.name,
            value=show(value),
            choices=", ".join(choices),
            hint=_hint(field),
        )
    if not value:
        raise_range(field, value, where, "not empty")


def rule_of(field: dataclasses.Field[Any]) -> str:
    """Return the numeric rule of a field in words."""
    low, high = field.metadata["minimum"], field.metadata["maximum"]
    if math.isinf(low) and math.isinf(high):
        return "a finite number"
    if math.isinf(high):
        return f"finite and at least {low}"
    return f"from {low} to {high}"


def raise_type(field: dataclasses.Field[Any], value: Any, where: str) -> typing.NoReturn:
    """Raise the type error of a field."""
    kind, _ = kind_of(field)
    expected = _NAMES[kind]
    if kind == "bool" and not isinstance(value, str):
        expected = "true or false"
    raise FieldTypeError(
        where=where,
        field=field.name,
        expected=expected,
        value=show(value),
        got=type(value).__name__,
        hint=_hint(field),
    )


def raise_range(
    field: dataclasses.Field[Any], value: Any, where: str, rule: str
) -> typing.NoReturn:
    """Raise the range error of a field with its rule in words."""
    raise FieldRangeError(
        where=where, field=field.name, value=show(value), rule=rule, hint=_hint(field)
    )


def _hint(field: dataclasses.Field[Any]) -> str:
    unit = field.metadata["unit"]
    ways = [flag_of(field), f"in {unit}" if unit else ""]
    details = ", ".join(way for way in ways if way)
    return f"Change {field.name} ({details})." if details else f"Change {field.name}."


def parse_text(field: dataclasses.Field[Any], text: str, where: str) -> Any:
    """Read the value of a field from the text of a flag or an environment variable.

    Args:
        field: the declaration.
        text: a decimal number, `on` or `off`, comma-separated integers, comma-separated ID=NUMBER,
            a word, or the one string of a list.
        where: how messages name the source.
    Raises:
        FieldTypeError, FieldRangeError, FieldChoiceError: the text is not such a value.
    """
    kind, _ = kind_of(field)
    try:
        value: Any = _convert(kind, text)
    except (ValueError, KeyError):
        raise_type(field, text, where)
    check_value(field, value, where)
    return as_stored(field, value)


def _convert(kind: str, text: str) -> Any:
    if kind in ("str", "strs"):
        return text
    if kind == "bool":
        return _ON[text.lower()]
    if not text.isascii() or "_" in text or text != text.strip():
        raise ValueError(text)  # int() would also read "1_000", blanks and digits of other scripts
    parts = text.split(",") if text else []
    if kind == "ints":
        return tuple(int(part) for part in parts)
    if kind == "biases":
        pairs = [part.partition("=") for part in parts]
        return tuple((token_id, float(bias)) for token_id, _, bias in pairs)
    return int(text) if kind == "int" else float(text)


def values_from_mapping(cls: type, mapping: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Read the fields that a JSON or TOML object names, with strict types.

    Args:
        cls: the settings class.
        mapping: field names to values as JSON or TOML gave them; a list stands for a tuple, one
            string for a list of one, an object of token ids to numbers for biases.
        where: how messages name the source.
    Returns:
        values ready for the constructor.
    Raises:
        UnknownField: a key that is no field, with the nearest names.
        FieldTypeError, FieldRangeError, FieldChoiceError: a value that breaks its rule.
    """
    known = fields_by_name(cls)
    values: dict[str, Any] = {}
    for name, value in mapping.items():
        if name not in known:
            raise UnknownField(where=where, field=name, nearest=nearest(name, known))
        check_value(known[name], value, where)
        values[name] = as_stored(known[name], value)
    return values


def values_as_mapping(settings: Any) -> dict[str, Any]:
    """Return what `values_from_mapping` reads back: biases become an object with text keys."""
    values = dataclasses.asdict(settings)
    for name, field in fields_by_name(type(settings)).items():
        if kind_of(field)[0] == "biases":
            values[name] = {str(token_id): bias for token_id, bias in values[name]}
    return values
