"""Prompts in, records out.

Prompts come from `--prompt` (repeatable), `--prompts FILE` (one a line) or `--input FILE.jsonl`
with one object a line: `prompt` or `prompt_token_ids`, optionally `id` and any field of
SamplingParams. Blank lines are skipped, a byte-order mark and CRLF are tolerated. A line without an
id gets its 0-based line index as text. A line that cannot be used becomes an error record and the
others run.

A result file is written line by line as requests finish, so an interruption loses nothing that was
finished; once the job is complete the lines are put into the order of the input. An existing file
is refused, never overwritten.
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn

from graphs.errors import EngineError
from runtime.config import SamplingParams
from runtime.errors import (
    BadId,
    BadPrompt,
    DuplicateId,
    EmptyPrompt,
    InputUnreadable,
    LineNotJson,
    LineNotObject,
    LineNotText,
    NoPrompts,
    OutputExists,
    OutputUnwritable,
    PromptMissing,
)
from runtime.fields import show
from runtime.request import Request

_BOM = b"\xef\xbb\xbf"
_OWN_KEYS = ("id", "prompt", "prompt_token_ids")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One usable line.

    Attributes:
        index: 0-based place among the lines that are not blank; results are ordered by it.
        line_number: 1-based line of the file, or ordinal of the --prompt flag.
        job_id: unique in the job.
        prompt: the text, None if the line has token ids.
        prompt_token_ids: the ids, None if the line has text. Their range is checked by
            `check_prompt`.
        params: the job's defaults with the fields of the line.
    """

    index: int
    line_number: int
    job_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    params: SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class LineError:
    """One line that cannot be run.

    Attributes:
        index, line_number: as in Job.
        job_id: the line's id, or its default id where none could be read.
        code: name of the error class.
        message: what is wrong and what to do.
    """

    index: int
    line_number: int
    job_id: str
    code: str
    message: str


class _DuplicateKey(ValueError):
    def __init__(self, name: str) -> None:
        super().__init__(f"key {show(name)} appears twice")


class _NotJsonNumber(ValueError):
    def __init__(self, word: str) -> None:
        super().__init__(f"{word} is no JSON number")


def read_jobs(
    *,
    defaults: SamplingParams,
    prompts: Sequence[str] = (),
    prompts_file: str | None = None,
    input_file: str | None = None,
) -> Iterator[Job | LineError]:
    """Read the jobs of a command; exactly one source must be given.

    Args:
        defaults: sampling parameters of lines that say nothing.
        prompts: values of --prompt.
        prompts_file: path of --prompts, "-" for stdin.
        input_file: path of --input, "-" for stdin.
    Returns:
        an iterator over the jobs and the unusable lines, in order of the input.
    Raises:
        NoPrompts: no source, or several.
        InputUnreadable: the file cannot be opened (at once) or read.
        EmptyPrompt: a --prompt without text (at once).
    """
    sources = {"--prompt": prompts, "--prompts": prompts_file, "--input": input_file}
    given = [flag for flag, source in sources.items() if source]
    if len(given) != 1:
        raise NoPrompts(got=" and ".join(given) or "none")
    if input_file:
        return _read_objects(_open_lines(input_file, "--input"), defaults)
    if prompts_file:
        return _read_texts(_open_lines(prompts_file, "--prompts"), defaults)
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise EmptyPrompt(request_id=str(index))
    return (
        _text_job(_Line(index, index + 1, b""), prompt, defaults)
        for index, prompt in enumerate(prompts)
    )


def result_record(request: Request, text: str) -> dict[str, Any]:
    """Return the record of a finished request.

    Args:
        request: finished.
        text: its decoded output.
    """
    return {
        "id": request.request_id,
        "prompt_tokens": len(request.prompt_token_ids),
        "completion_tokens": len(request.output_token_ids),
        "text": text,
        "token_ids": list(request.output_token_ids),
        "finish_reason": request.finish_reason,
    }


def error_record(line: LineError) -> dict[str, Any]:
    """Return the record of a line that cannot be run."""
    return {
        "id": line.job_id,
        "line": line.line_number,
        "error": {"code": line.code, "message": line.message},
    }


def failed_job(job: Job, error: EngineError) -> LineError:
    """Return the line error of a job that was refused later, such as one with too long a prompt."""
    return _line_error(_Line(job.index, job.line_number, b""), job.job_id, error)


def refuse_existing(path: str | Path, flag: str) -> None:
    """Refuse to write over a file that holds something.

    Raises:
        OutputExists: the file is there and not empty.
    """
    path = Path(path)
    if path.is_file() and path.stat().st_size:
        raise OutputExists(path=path, size_bytes=path.stat().st_size, flag=flag)


class ResultWriter:
    """Write one JSON object a line, to stdout or to a new file.

    A record for a file is on disk when `write` returns, in the order of completion; leaving the
    context without an exception puts the lines into the order of the input (written aside, then
    renamed). Records for stdout come in the order of the input, so one may wait for those before
    it; leaving the context writes all that wait. A file that got no record is removed, so that a
    run that failed early can be repeated.

    Args:
        path: the file, None or "-" for stdout.
        flag: the flag that named it, for messages.
    Raises:
        OutputExists: the file is there and not empty.
        OutputUnwritable: it cannot be created.
    """

    def __init__(self, path: str | None, *, flag: str = "--output") -> None:
        self._path = None if path in (None, "-") else Path(str(path))
        self._flag = flag
        self._indices: list[int] = []  # of the lines of the file
        self._held: dict[int, bytes] = {}  # of stdout, waiting for earlier ones
        self._next = 0
        self._is_regular = False
        self._file: IO[bytes] | None = None
        if self._path is not None:
            self._file = self._open(self._path)

    @property
    def num_written(self) -> int:
        """Records written so far, those that wait not counted."""
        return len(self._indices)

    def write(self, index: int, record: Mapping[str, Any]) -> None:
        """Write a record.

        Args:
            index: place in the order of the input, each used once, from 0 without gaps for a
                complete job.
            record: JSON values.
        Raises:
            OutputUnwritable: the disk is full, or the file is gone.
            BrokenPipeError: nobody reads stdout any more.
        """
        text = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
        # A lone surrogate (only an id can hold one) becomes its JSON escape again.
        line = text.encode("utf-8", "backslashreplace")
        if self._file is not None:
            self._write_file(self._file, line)
            self._indices.append(index)
            return
        self._held[index] = line
        while self._next in self._held:
            _write_stdout(self._held.pop(self._next))
            self._indices.append(self._next)
            self._next += 1

    def close(self, *, is_complete: bool) -> None:
        """Write what waits and close; a complete file is put into the order of the input."""
        if self._file is None:
            for index in sorted(self._held):
                _write_stdout(self._held.pop(index))
                self._indices.append(index)
            return
        file, self._file = self._file, None
        path = self._path
        try:
            file.close()
            if path is None or not self._is_regular:
                return
            if not path.stat().st_size:
                path.unlink()
            elif is_complete and self._indices != sorted(self._indices):
                self._sort(path)
        except OSError as error:
            self._fail(error)

    def __enter__(self) -> "ResultWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(is_complete=error is None)

    def _open(self, path: Path) -> IO[bytes]:
        try:
            refuse_existing(path, self._flag)
            file = path.open("ab")
            self._is_regular = path.is_file()
        except OSError as error:
            self._fail(error)
        return file

    def _write_file(self, file: IO[bytes], line: bytes) -> None:
        try:
            file.write(line)
            file.flush()
        except OSError as error:
            self._fail(error)

    def _sort(self, path: Path) -> None:
        order = sorted(range(len(self._indices)), key=self._indices.__getitem__)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with path.open("rb") as source, temporary.open("wb") as target:
                starts = [0]
                starts.extend(source.tell() for _ in iter(source.readline, b""))
                for place in order:
                    source.seek(starts[place])
                    target.write(source.readline())
                target.flush()
                os.fsync(target.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def _fail(self, error: OSError) -> NoReturn:
        raise OutputUnwritable(
            path=self._path, reason=error.strerror or error, flag=self._flag
        ) from error


def _write_stdout(line: bytes) -> None:
    # Bytes, so that the locale has no say; a captured stdout may have no buffer.
    buffer = getattr(sys.stdout, "buffer", None)
    if buffer is None:
        sys.stdout.write(line.decode())
    else:
        buffer.write(line)
    sys.stdout.flush()


def _open_lines(path: str, flag: str) -> Iterator[bytes]:
    if path == "-":
        return _lines(sys.stdin.buffer, path, flag)
    try:
        file = Path(path).open("rb")  # noqa: SIM115 - the generator closes it
        if Path(path).is_dir():
            raise IsADirectoryError
    except OSError as error:
        raise InputUnreadable(path=path, reason=error.strerror or "a folder", flag=flag) from error
    return _lines(file, path, flag)


def _lines(file: IO[bytes], path: str, flag: str) -> Iterator[bytes]:
    try:
        with file:
            for number, line in enumerate(file):
                text = line.removeprefix(_BOM) if number == 0 else line
                yield text.removesuffix(b"\n").removesuffix(b"\r")
    except OSError as error:
        raise InputUnreadable(path=path, reason=error.strerror, flag=flag) from error


@dataclass(frozen=True, slots=True)
class _Line:
    """A line that is not blank: place among those, 1-based number in the file, bytes."""

    index: int
    number: int
    raw: bytes

    @property
    def default_id(self) -> str:
        return str(self.number - 1)


def _not_blank(lines: Iterable[bytes]) -> Iterator[_Line]:
    index = 0
    for number, raw in enumerate(lines, 1):
        if raw.strip():
            yield _Line(index, number, raw)
            index += 1


def _read_texts(lines: Iterable[bytes], defaults: SamplingParams) -> Iterator[Job | LineError]:
    for line in _not_blank(lines):
        try:
            yield _text_job(line, _decode(line), defaults)
        except EngineError as error:
            yield _line_error(line, line.default_id, error)


def _read_objects(lines: Iterable[bytes], defaults: SamplingParams) -> Iterator[Job | LineError]:
    first_numbers: dict[str, int] = {}
    for line in _not_blank(lines):
        job_id = line.default_id
        try:
            fields = _parse_object(line)
            job_id = _job_id(fields, line)
            job = _object_job(fields, job_id, line, defaults)
            if job_id in first_numbers:
                raise DuplicateId(line=line.number, id=job_id, first_line=first_numbers[job_id])
        except EngineError as error:
            yield _line_error(line, job_id, error)
        else:
            first_numbers[job_id] = line.number
            yield job


def _text_job(line: _Line, prompt: str, defaults: SamplingParams) -> Job:
    return Job(
        index=line.index,
        line_number=line.number,
        job_id=line.default_id,
        prompt=prompt,
        prompt_token_ids=None,
        params=defaults,
    )


def _line_error(line: _Line, job_id: str, error: EngineError) -> LineError:
    code = type(error).__name__
    return LineError(
        index=line.index,
        line_number=line.number,
        job_id=job_id,
        code=code,
        message=str(error).removeprefix(f"{code}: "),
    )


def _decode(line: _Line) -> str:
    try:
        return line.raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise LineNotText(line=line.number, position=error.start) from error


def _parse_object(line: _Line) -> dict[str, Any]:
    try:
        value = json.loads(_decode(line), object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError as error:
        raise LineNotJson(line=line.number, reason="nested too deeply") from error
    except ValueError as error:
        raise LineNotJson(line=line.number, reason=error) from error
    if not isinstance(value, dict):
        raise LineNotObject(line=line.number, got=type(value).__name__)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _DuplicateKey(twice)
    return fields


def _no_constant(word: str) -> NoReturn:
    raise _NotJsonNumber(word)


def _job_id(fields: Mapping[str, Any], line: _Line) -> str:
    if "id" not in fields:
        return line.default_id
    job_id = fields["id"]
    if not isinstance(job_id, str) or not job_id or not _is_text(job_id):
        raise BadId(line=line.number, got=show(job_id))
    return job_id


def _object_job(
    fields: Mapping[str, Any], job_id: str, line: _Line, defaults: SamplingParams
) -> Job:
    prompt, token_ids = _prompt(fields, job_id, line)
    rest = {name: value for name, value in fields.items() if name not in _OWN_KEYS}
    return Job(
        index=line.index,
        line_number=line.number,
        job_id=job_id,
        prompt=prompt,
        prompt_token_ids=token_ids,
        params=SamplingParams.from_mapping(rest, defaults, where=f"line {line.number}"),
    )


def _prompt(
    fields: Mapping[str, Any], job_id: str, line: _Line
) -> tuple[str | None, list[int] | None]:
    given = [name for name in ("prompt", "prompt_token_ids") if name in fields]
    if len(given) != 1:
        raise PromptMissing(line=line.number, got="both" if given else "neither")
    value = fields[given[0]]
    if given[0] == "prompt":
        if not isinstance(value, str) or not _is_text(value):
            raise BadPrompt(
                line=line.number, field="prompt", expected="a string of valid text", got=show(value)
            )
    elif not isinstance(value, list) or any(type(item) is not int for item in value):
        raise BadPrompt(
            line=line.number,
            field="prompt_token_ids",
            expected="a list of integers",
            got=show(value),
        )
    if not value:
        raise EmptyPrompt(request_id=job_id)
    return (value, None) if given[0] == "prompt" else (None, value)


def _is_text(value: str) -> bool:
    # JSON can spell half of a surrogate pair, which no tokenizer and no file accepts.
    return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)
