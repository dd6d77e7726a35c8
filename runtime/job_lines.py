"""Lines of a job file: opened, unpacked, cut and read as JSON objects.

A file that begins with the two bytes of gzip is unpacked on the way, whatever its name and also
from stdin. A byte-order mark and CRLF are tolerated, blank lines are skipped. A line that is longer
than any prompt needs is never held in memory.
"""

import gzip
import io
import json
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from runtime.errors import InputUnreadable, LineNotJson, LineNotObject, LineNotText, LineTooLong
from runtime.fields import show

# A million tokens of text take about 5 MB; if every character is escaped, 30 MB.
MAX_LINE_BYTES = 32 * 2**20

_BOM = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class Line:
    """A line that is not blank.

    Attributes:
        index: 0-based place among those.
        number: 1-based line of the file, or ordinal of a --prompt flag.
        raw: its bytes without the line end; only their beginning if it is too long.
        num_bytes: how many it had.
    """

    index: int
    number: int
    raw: bytes
    num_bytes: int = 0

    @property
    def default_id(self) -> str:
        """The id of a line that names none."""
        return str(self.number - 1)


class _DuplicateKey(ValueError):
    def __init__(self, name: str) -> None:
        super().__init__(f"key {show(name)} appears twice")


class _NotJsonNumber(ValueError):
    def __init__(self, word: str) -> None:
        super().__init__(f"{word} is no JSON number")


def open_lines(path: str, flag: str) -> Iterator[Line]:
    """Open a file now and yield its lines that are not blank.

    Args:
        path: the file, "-" for stdin.
        flag: the flag that named it, for messages.
    Raises:
        InputUnreadable: it cannot be opened (at once); reading or unpacking breaks off.
    """
    if path == "-":
        return _not_blank(_read(sys.stdin.buffer, path, flag))
    try:
        file = Path(path).open("rb")  # noqa: SIM115 - the generator closes it
        if Path(path).is_dir():
            raise IsADirectoryError
    except OSError as error:
        raise InputUnreadable(path=path, reason=error.strerror or "a folder", flag=flag) from error
    return _not_blank(_read(file, path, flag))


def decode(line: Line) -> str:
    """Return the text of a line.

    Raises:
        LineTooLong, LineNotText: it has none.
    """
    if line.num_bytes > MAX_LINE_BYTES:
        raise LineTooLong(line=line.number, num_bytes=line.num_bytes, limit=MAX_LINE_BYTES)
    try:
        return line.raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise LineNotText(line=line.number, position=error.start) from error


def parse_object(line: Line) -> dict[str, Any]:
    """Return the JSON object that a line is; a key that appears twice makes it none.

    Raises:
        LineTooLong, LineNotText, LineNotJson, LineNotObject: it is no object.
    """
    try:
        value = json.loads(decode(line), object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError as error:
        raise LineNotJson(line=line.number, reason="nested too deeply") from error
    except ValueError as error:
        raise LineNotJson(line=line.number, reason=error) from error
    if not isinstance(value, dict):
        raise LineNotObject(line=line.number, got=type(value).__name__)
    return value


def _read(file: IO[bytes], path: str, flag: str) -> Iterator[tuple[bytes, int]]:
    try:
        with file:
            buffered = io.BufferedReader(file)  # type: ignore[type-var]  # readinto is all
            if buffered.peek(2).startswith(_GZIP):
                yield from _cut(gzip.GzipFile(fileobj=buffered))
            else:
                yield from _cut(buffered)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputUnreadable(path=path, reason=reason.rstrip("."), flag=flag) from error


def _cut(file: io.BufferedIOBase) -> Iterator[tuple[bytes, int]]:
    """Yield each line without its end, and its length; of too long a line only the beginning."""
    limit = MAX_LINE_BYTES + len(_BOM) + 2  # with everything that is taken off
    is_first = True
    while part := file.readline(limit):
        num_bytes = len(part)
        line = part.removeprefix(_BOM) if is_first else part
        line = line.removesuffix(b"\n").removesuffix(b"\r")
        is_first = False
        if num_bytes < limit or part.endswith(b"\n"):
            yield line, len(line)
            continue
        while not part.endswith(b"\n") and (part := file.readline(limit)):
            num_bytes += len(part)
        yield line[:80], num_bytes - part.endswith(b"\n")


def _not_blank(lines: Iterable[tuple[bytes, int]]) -> Iterator[Line]:
    index = 0
    for number, (raw, num_bytes) in enumerate(lines, 1):
        if num_bytes > MAX_LINE_BYTES or raw.strip():
            yield Line(index, number, raw, num_bytes)
            index += 1


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) == len(pairs):
        return fields
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            break
        seen.add(name)
    raise _DuplicateKey(name)


def _no_constant(word: str) -> NoReturn:
    raise _NotJsonNumber(word)
