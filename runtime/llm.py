"""LLM: the Python interface."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from graphs.errors import EngineError
from runtime.config import EngineConfig, SamplingParams
from runtime.engine import Engine, EnginePlan, LoadProgress, plan_engine, step
from runtime.errors import ParamsCountMismatch, PromptTypeError
from runtime.metrics import Metrics
from runtime.request import Request, check_prompt, request_seed

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The result of one prompt.

    Args:
        request_id: place of the prompt in the call, as text.
        prompt: the text, None for a prompt of token ids.
        prompt_token_ids: what the model read.
        text: the decoded output without special tokens.
        token_ids: the sampled tokens; a token that ended the output is the last one.
        finish_reason: "stop" or "length".
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str


class LLM:
    """A loaded model.

    Args:
        model: checkpoint directory, None for the built-in checkpoint, or a whole EngineConfig.
        progress: called with (bytes done, bytes in all) while weights load.
        **settings: fields of EngineConfig, replacing those of a given one.
    Raises:
        EngineError: a subclass for each kind of fault in settings, checkpoint or memory.
    """

    def __init__(
        self,
        model: str | EngineConfig | None = None,
        *,
        progress: LoadProgress | None = None,
        **settings: Any,
    ) -> None:
        given = model if isinstance(model, EngineConfig) else EngineConfig(model=model)
        plan = plan_engine(dataclasses.replace(given, **settings))
        self._start(plan, Metrics(), progress)

    @classmethod
    def from_plan(
        cls, plan: EnginePlan, metrics: Metrics, progress: LoadProgress | None = None
    ) -> "LLM":
        """Load a model whose plan was made, and perhaps shown, before."""
        llm = cls.__new__(cls)
        llm._start(plan, metrics, progress)
        return llm

    def _start(self, plan: EnginePlan, metrics: Metrics, progress: LoadProgress | None) -> None:
        self.engine = Engine(plan, metrics, progress)
        self.metrics = metrics

    @property
    def config(self) -> EngineConfig:
        """The resolved configuration."""
        return self.engine.plan.config

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; results come in the order of the prompts.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            sampling_params: one object for all prompts, or one for each.
        Raises:
            EmptyPrompt, PromptTooLong, TokenOutOfRange, RequestNeverFits: a prompt that cannot run;
                nothing ran.
            ParamsCountMismatch, PromptTypeError: the arguments do not fit each other.
        """
        listed = _as_list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(listed)
        else:
            params = list(sampling_params)
        if len(params) != len(listed):
            raise ParamsCountMismatch(num_params=len(params), num_prompts=len(listed))
        requests = [
            self.make_request(str(index), prompt, own)
            for index, (prompt, own) in enumerate(zip(listed, params, strict=True))
        ]
        for request in requests:
            self.engine.scheduler.check(request)
        for _ in self.run(requests):
            pass
        return [self.output(request) for request in requests]

    def make_request(self, request_id: str, prompt: Prompt, params: SamplingParams) -> Request:
        """Encode and check one prompt.

        Raises:
            EmptyPrompt, PromptTooLong, TokenOutOfRange: the prompt cannot run.
        """
        engine, text = self.engine, prompt if isinstance(prompt, str) else None
        ids = engine.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if text == "":
            ids = []
        limit = self.config.max_model_len
        assert limit is not None
        check_prompt(request_id, ids, engine.plan.model.text_config.vocab_size, limit)
        seed = params.seed
        if seed is None:
            seed = request_seed(self.config.seed, request_id, ids)
        return Request(request_id, ids, params, seed, text)

    def run(
        self,
        requests: Iterable[Request],
        refuse: Callable[[Request, EngineError], None] | None = None,
    ) -> Iterator[Request]:
        """Run requests and yield each as it finishes.

        Requests are taken from the iterable only as the queue empties, so it may be longer than
        memory.

        Args:
            requests: made by `make_request`; ids must be unique.
            refuse: called for a request that cannot be queued; without it the error is raised.
        """
        scheduler, pending = self.engine.scheduler, iter(requests)
        queued: dict[str, Request] = {}
        try:
            yield from self._run(pending, queued, refuse)
        finally:
            for request_id in queued:  # left early: nothing of this call may stay behind
                scheduler.abort(request_id)
        self.engine.blocks.check_idle()
        self.engine.slots.check_idle()

    def _run(
        self,
        pending: Iterator[Request],
        queued: dict[str, Request],
        refuse: Callable[[Request, EngineError], None] | None,
    ) -> Iterator[Request]:
        scheduler = self.engine.scheduler
        is_open = True
        while is_open or scheduler.has_work:
            while is_open and scheduler.num_waiting < max(1, self.config.max_num_seqs or 1):
                request = next(pending, None)
                is_open = request is not None
                if request is not None:
                    self._enqueue(request, queued, refuse)
            for request in step(self.engine):
                del queued[request.request_id]
                self.metrics.record_finished(
                    request.request_id,
                    len(request.prompt_token_ids),
                    len(request.output_token_ids),
                    request.num_preemptions,
                )
                yield request

    def output(self, request: Request) -> RequestOutput:
        """Return the result of a finished request."""
        assert request.finish_reason is not None
        return RequestOutput(
            request.request_id,
            request.prompt,
            list(request.prompt_token_ids),
            self.engine.tokenizer.decode(request.output_token_ids),
            list(request.output_token_ids),
            request.finish_reason,
        )

    def _enqueue(
        self,
        request: Request,
        queued: dict[str, Request],
        refuse: Callable[[Request, EngineError], None] | None,
    ) -> None:
        try:
            self.engine.scheduler.add(request)
        except EngineError as error:
            if refuse is None:
                raise
            refuse(request, error)
        else:
            queued[request.request_id] = request
            self.metrics.record_arrival(request.request_id)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items: list[Any] = list(prompts)
    if items and all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        return [items]
    for index, item in enumerate(items):
        is_ids = isinstance(item, Sequence) and all(
            isinstance(i, int) and not isinstance(i, bool) for i in item
        )
        if not (isinstance(item, str) or is_ids):
            raise PromptTypeError(index=index, got=type(item).__name__)
    return items
