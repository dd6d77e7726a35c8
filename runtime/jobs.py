"""Prompts in: the jobs of a command.

Prompts come from `--prompt` (repeatable), `--prompts FILE` (one a line) or `--input FILE.jsonl`
with one object a line. An object is of one of three forms: `prompt` or `prompt_token_ids`;
`messages`, a chat; a line of OpenAI's batch files. The first two have an optional `id` and any
field of SamplingParams. A line without an id gets its 0-based line index as text. A line that
cannot be used becomes an error record and the others run.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphs.errors import EngineError
from runtime.chat import CHAT_KEYS, Chat, read_chat
from runtime.config import SamplingParams
from runtime.errors import (
    BadId,
    BadPrompt,
    DuplicateId,
    EmptyPrompt,
    LineNotJson,
    NoPrompts,
    OutputExists,
    PromptMissing,
)
from runtime.fields import is_text, show
from runtime.job_lines import Line, decode, open_lines, parse_object
from runtime.openai_batch import BatchHead, batch_head, is_batch_line, read_batch_line
from runtime.openai_response import error_line

_PROMPT_KEYS = ("prompt", "prompt_token_ids")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One usable line; one of prompt, prompt_token_ids and chat is not None.

    Attributes:
        index: 0-based place among the lines that are not blank; results are ordered by it.
        line_number: 1-based line of the file, or ordinal of the --prompt flag.
        job_id: unique in the job.
        prompt: the text.
        prompt_token_ids: the ids. Their range is checked by `check_prompt`.
        params: the job's defaults with the fields of the line.
        chat: the conversation.
        batch: what the response repeats, for a line of a batch file.
    """

    index: int
    line_number: int
    job_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    params: SamplingParams
    chat: Chat | None = None
    batch: BatchHead | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LineError:
    """One line that cannot be run.

    Attributes:
        index, line_number: as in Job.
        job_id: the line's id, or its default id where none could be read.
        code: name of the error class.
        message: what is wrong and what to do.
        batch: as in Job.
    """

    index: int
    line_number: int
    job_id: str
    code: str
    message: str
    batch: BatchHead | None = None


def read_jobs(
    *,
    defaults: SamplingParams,
    prompts: Sequence[str] = (),
    prompts_file: str | None = None,
    input_file: str | None = None,
    has_chat: bool = False,
) -> Iterator[Job | LineError]:
    """Read the jobs of a command; exactly one source must be given.

    Args:
        defaults: sampling parameters of lines that say nothing.
        prompts: values of --prompt.
        prompts_file: path of --prompts, "-" for stdin.
        input_file: path of --input, "-" for stdin.
        has_chat: whether lines of --input may be chats and lines of batch files.
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
        reader = _Objects(defaults, has_chat)
        return reader.read(open_lines(input_file, "--input"))
    if prompts_file:
        return _read_texts(open_lines(prompts_file, "--prompts"), defaults)
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise EmptyPrompt(request_id=str(index))
    return (
        _text_job(Line(index, index + 1, b""), prompt, defaults)
        for index, prompt in enumerate(prompts)
    )


def error_record(line: LineError) -> dict[str, Any]:
    """Return the record of a line that cannot be run."""
    if line.batch is not None:
        return error_line(line.batch, line.code, line.message, line.line_number)
    return {
        "id": line.job_id,
        "line": line.line_number,
        "error": {"code": line.code, "message": line.message},
    }


def failed_job(job: Job, error: EngineError) -> LineError:
    """Return the line error of a job that was refused later, such as one with too long a prompt."""
    line = Line(job.index, job.line_number, b"")
    return _line_error(line, job.job_id, error, job.batch)


def refuse_existing(path: str | Path, flag: str) -> None:
    """Refuse to write over a file that holds something.

    Raises:
        OutputExists: the file is there and not empty.
    """
    path = Path(path)
    if path.is_file() and path.stat().st_size:
        raise OutputExists(path=path, size_bytes=path.stat().st_size, flag=flag)


def _read_texts(lines: Iterable[Line], defaults: SamplingParams) -> Iterator[Job | LineError]:
    for line in lines:
        try:
            yield _text_job(line, decode(line), defaults)
        except EngineError as error:
            yield _line_error(line, line.default_id, error)


class _Objects:
    """Reads lines of --input."""

    def __init__(self, defaults: SamplingParams, has_chat: bool) -> None:
        self._defaults = defaults
        self._has_chat = has_chat
        self._first_numbers: dict[str, int] = {}  # of the ids

    def read(self, lines: Iterable[Line]) -> Iterator[Job | LineError]:
        for line in lines:
            job_id, head = line.default_id, None
            try:
                fields = parse_object(line)
                if self._has_chat and is_batch_line(fields):
                    head = batch_head(fields)
                    job_id = job_id if head.custom_id is None else head.custom_id
                    job = self._batch_job(fields, head, line)
                else:
                    job_id = _job_id(fields, line)
                    job = self._simple_job(fields, job_id, line)
                self._claim(job_id, line)
            except EngineError as error:
                yield _line_error(line, job_id, error, head)
            except RecursionError:  # what the parser just managed is too deep for what follows
                too_deep = LineNotJson(line=line.number, reason="nested too deeply")
                yield _line_error(line, job_id, too_deep, head)
            else:
                yield job

    def _claim(self, job_id: str, line: Line) -> None:
        first = self._first_numbers.setdefault(job_id, line.number)
        if first != line.number:
            raise DuplicateId(line=line.number, id=job_id, first_line=first)

    def _batch_job(self, fields: Mapping[str, Any], head: BatchHead, line: Line) -> Job:
        request = read_batch_line(fields, head, line.number, self._defaults)
        return Job(
            index=line.index,
            line_number=line.number,
            job_id=head.custom_id or "",
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            params=request.params,
            chat=request.chat,
            batch=request.head,
        )

    def _simple_job(self, fields: Mapping[str, Any], job_id: str, line: Line) -> Job:
        where = f"line {line.number}"
        names = (*_PROMPT_KEYS, "messages") if self._has_chat else _PROMPT_KEYS
        name = _prompt_key(fields, names, line)
        own = {"id", *CHAT_KEYS} if name == "messages" else {"id", name}
        rest = {name: value for name, value in fields.items() if name not in own}
        prompt, token_ids, chat = None, None, None
        if name == "messages":
            chat = read_chat(fields, where)
        elif name == "prompt":
            prompt = _prompt_text(fields[name], job_id, line)
        else:
            token_ids = _prompt_ids(fields[name], job_id, line)
        return Job(
            index=line.index,
            line_number=line.number,
            job_id=job_id,
            prompt=prompt,
            prompt_token_ids=token_ids,
            params=SamplingParams.from_mapping(rest, self._defaults, where=where),
            chat=chat,
        )


def _text_job(line: Line, prompt: str, defaults: SamplingParams) -> Job:
    return Job(
        index=line.index,
        line_number=line.number,
        job_id=line.default_id,
        prompt=prompt,
        prompt_token_ids=None,
        params=defaults,
    )


def _line_error(
    line: Line, job_id: str, error: EngineError, batch: BatchHead | None = None
) -> LineError:
    code = type(error).__name__
    return LineError(
        index=line.index,
        line_number=line.number,
        job_id=job_id,
        code=code,
        message=str(error).removeprefix(f"{code}: "),
        batch=batch,
    )


def _job_id(fields: Mapping[str, Any], line: Line) -> str:
    if "id" not in fields:
        return line.default_id
    job_id = fields["id"]
    if not isinstance(job_id, str) or not job_id or not is_text(job_id):
        raise BadId(line=line.number, got=show(job_id))
    return job_id


def _prompt_key(fields: Mapping[str, Any], names: Sequence[str], line: Line) -> str:
    given = [name for name in names if name in fields]
    if len(given) == 1:
        return given[0]
    quoted = [f"'{name}'" for name in names]
    expected = f"{', '.join(quoted[:-1])} and {quoted[-1]}"
    got = "neither" if not given else "both" if len(given) == 2 else "all"
    raise PromptMissing(line=line.number, expected=expected, got=got)


def _prompt_text(value: Any, job_id: str, line: Line) -> str:
    if not isinstance(value, str) or not is_text(value):
        expected = "a string of valid text"
        raise BadPrompt(line=line.number, field="prompt", expected=expected, got=show(value))
    if not value:
        raise EmptyPrompt(request_id=job_id)
    return value


def _prompt_ids(value: Any, job_id: str, line: Line) -> list[int]:
    if not isinstance(value, list) or any(type(item) is not int for item in value):
        expected = "a list of integers"
        raise BadPrompt(
            line=line.number, field="prompt_token_ids", expected=expected, got=show(value)
        )
    if not value:
        raise EmptyPrompt(request_id=job_id)
    return value
