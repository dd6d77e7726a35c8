"""Records out: what a line becomes, and the file or stream that takes it.

A result file is written line by line as requests finish, so an interruption loses nothing that was
finished; once the job is complete the lines are put into the order of the input, unless the order
of completion was asked for. An existing file is refused, never overwritten.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, NoReturn

from runtime.errors import OutputUnwritable
from runtime.jobs import Job, refuse_existing
from runtime.logprob_records import logprob_record, prompt_logprob_records
from runtime.openai_response import response_line
from runtime.request import Request

if TYPE_CHECKING:
    from model.tokenizer import Tokenizer
    from runtime.chat import ChatFormat


def result_record(
    job: Job,
    requests: Sequence[Request],
    tokenizer: "Tokenizer",
    chat_format: "ChatFormat | None" = None,
) -> dict[str, Any]:
    """Return the record of a job that is complete.

    Args:
        job: the line.
        requests: its outputs in order, all finished.
        tokenizer: of the checkpoint.
        chat_format: reads the reply if the job is a chat.
    Raises:
        ReplyUnreadable: an output is no chat reply.
    """
    if job.batch is not None:
        return response_line(job.batch, job.chat, requests, tokenizer, chat_format)
    record: dict[str, Any] = {
        "id": job.job_id,
        "prompt_tokens": len(requests[0].prompt_token_ids),
        "completion_tokens": sum(len(request.output_token_ids) for request in requests),
    }
    outputs = [_output(job, request, tokenizer, chat_format) for request in requests]
    if job.params.n == 1:
        record |= outputs[0]
    else:
        record["choices"] = [{"index": index, **output} for index, output in enumerate(outputs)]
    if requests[0].prompt_logprobs is not None:
        record["prompt_logprobs"] = prompt_logprob_records(requests[0], tokenizer)
    return record


def _output(
    job: Job, request: Request, tokenizer: "Tokenizer", chat_format: "ChatFormat | None"
) -> dict[str, Any]:
    output: dict[str, Any] = {"token_ids": list(request.output_token_ids)}
    if job.chat is None:
        text = request.text.text if request.text is not None else ""
        output = {"text": text, **output, "finish_reason": request.finish_reason}
    else:
        assert chat_format is not None, "it encoded the conversation"
        prefix = f"call_{job.job_id}_{request.sample_index}"
        reply = chat_format.reply(job.chat, request, prefix)
        output = {"message": reply.message(), **output, "finish_reason": reply.finish_reason}
    if request.logprobs is not None:
        output["logprobs"] = [logprob_record(entry, tokenizer) for entry in request.logprobs]
    return output


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
        is_ordered: False leaves the order of completion, and nothing waits.
    Raises:
        OutputExists: the file is there and not empty.
        OutputUnwritable: it cannot be created.
    """

    def __init__(
        self, path: str | None, *, flag: str = "--output", is_ordered: bool = True
    ) -> None:
        self._path = None if path in (None, "-") else Path(str(path))
        self._flag = flag
        self._is_ordered = is_ordered
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
        if not self._is_ordered:
            _write_stdout(line)
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
            elif is_complete and self._is_ordered and self._indices != sorted(self._indices):
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
