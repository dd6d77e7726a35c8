"""A job on a loaded model: every line gets exactly one record, whatever happens to it."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from graphs.errors import EngineError
from runtime.errors import InputUnreadable
from runtime.job_output import ResultWriter, result_record
from runtime.jobs import Job, LineError, error_record, failed_job
from runtime.llm import LLM
from runtime.request import Request


@dataclass(slots=True)
class _OpenJob:
    """A job some of whose requests are unfinished."""

    job: Job
    finished: list[Request] = field(default_factory=list)


class JobRun:
    """Runs jobs and writes their records.

    Args:
        llm: the model.
        writer: takes the records.
        on_line: called for each line that got its record.
    """

    def __init__(self, llm: LLM, writer: ResultWriter, on_line: Callable[[], None]) -> None:
        self._llm = llm
        self._writer = writer
        self._on_line = on_line
        self._open: dict[str, _OpenJob] = {}
        self._input_error: InputUnreadable | None = None

    def run(self, items: Iterable[Job | LineError]) -> None:
        """Run the jobs; they are taken from the iterable only as the queue empties.

        Raises:
            InputUnreadable: reading broke off; all that was read has its record.
            OutputUnwritable, BrokenPipeError: records cannot be written.
        """
        for request in self._llm.run(self._requests(items), self._refuse):
            self._take(request)
        if self._input_error is not None:
            raise self._input_error

    def _requests(self, items: Iterable[Job | LineError]) -> Iterator[Request]:
        """Yield the requests of the jobs; write the records of lines that have none."""
        try:
            for item in items:
                if isinstance(item, LineError):
                    self._fail(item)
                    continue
                for request in self._prepare(item):
                    if item.job_id in self._open:  # not refused with another of its requests
                        yield request
        except InputUnreadable as error:
            self._input_error = error  # what runs is finished first

    def _prepare(self, job: Job) -> list[Request]:
        try:
            requests = self._make_requests(job)
        except EngineError as error:
            self._fail(failed_job(job, error))
            return []
        self._open[job.job_id] = _OpenJob(job)
        return requests

    def _make_requests(self, job: Job) -> list[Request]:
        if job.chat is not None:
            return self._llm.make_chat_requests(job.job_id, job.chat, job.params)
        prompt = job.prompt if job.prompt is not None else job.prompt_token_ids
        assert prompt is not None, "a job without a chat has a prompt"
        return self._llm.make_requests(job.job_id, prompt, job.params)

    def _take(self, request: Request) -> None:
        """Note a finished request; write the record of a job that it completes."""
        opened = self._open.get(request.group)
        if opened is None:
            return  # the job has failed
        job = opened.job
        if request.error is not None:
            self._fail_open(job, request.error)
            return
        opened.finished.append(request)
        if len(opened.finished) < job.params.n:
            return
        outputs = sorted(opened.finished, key=lambda output: output.sample_index)
        chat_format = None if job.chat is None else self._llm.chat_format
        try:
            record = result_record(job, outputs, self._llm.engine.tokenizer, chat_format)
        except EngineError as error:
            self._fail_open(job, error)
            return
        del self._open[job.job_id]
        self._writer.write(job.index, record)
        self._on_line()

    def _refuse(self, request: Request, error: EngineError) -> None:
        opened = self._open.get(request.group)
        if opened is not None:
            self._fail_open(opened.job, error)

    def _fail_open(self, job: Job, error: EngineError) -> None:
        del self._open[job.job_id]
        self._fail(failed_job(job, error))

    def _fail(self, line: LineError) -> None:
        self._writer.write(line.index, error_record(line))
        self._llm.metrics.record_failed()
        self._on_line()
