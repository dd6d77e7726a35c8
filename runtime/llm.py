"""LLM: the Python interface."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from graphs.errors import EngineError
from model.tokenizer import Tokenizer
from runtime.config import EngineConfig, SamplingParams
from runtime.engine import Engine, EnginePlan, LoadProgress, plan_engine, step
from runtime.errors import ParamsCountMismatch, PromptTypeError
from runtime.metrics import Metrics
from runtime.request import Request, TokenLogprob, check_params, check_prompt, request_seed
from runtime.sampler import make_constraints
from runtime.stops import OutputText

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Completion:
    """One output of a prompt.

    Args:
        index: its place among the prompt's outputs.
        text: decoded; cut before a stop string unless it was asked for.
        token_ids: sampled; those that ended the output included.
        finish_reason: "stop" or "length".
        logprobs: one entry per token, None unless asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[TokenLogprob] | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The result of one prompt.

    Args:
        request_id: place of the prompt in the call, as text.
        prompt: the text, None for a prompt of token ids.
        prompt_token_ids: what the model read.
        prompt_logprobs: one entry per prompt token, None for the first; None unless asked for.
        outputs: `n` completions, in order.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprob | None] | None
    outputs: list[Completion]

    @property
    def text(self) -> str:
        """Text of the first output."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the first output."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        """Why the first output ended."""
        return self.outputs[0].finish_reason


def request_output(group: Sequence[Request]) -> RequestOutput:
    """Return the result of a prompt whose requests have all finished."""
    first = group[0]
    completions = [
        Completion(
            request.sample_index,
            "" if request.text is None else request.text.text,
            list(request.output_token_ids),
            request.finish_reason or "",
            request.logprobs,
        )
        for request in group
    ]
    ids = list(first.prompt_token_ids)
    return RequestOutput(first.group, first.prompt, ids, first.prompt_logprobs, completions)


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
        groups = [
            self.make_requests(str(index), prompt, own)
            for index, (prompt, own) in enumerate(zip(listed, params, strict=True))
        ]
        requests = [request for group in groups for request in group]
        for request in requests:
            self.engine.scheduler.check(request)
        for request in self.run(requests):
            if request.error is not None:
                raise request.error
        return [request_output(group) for group in groups]

    def make_requests(self, group: str, prompt: Prompt, params: SamplingParams) -> list[Request]:
        """Encode and check one prompt; it becomes `params.n` requests.

        Args:
            group: id of the prompt; the only request's id, or the head of "<group>#<index>".
            prompt: text or token ids.
            params: of every output.
        Raises:
            EmptyPrompt, PromptTooLong, TokenOutOfRange, ParamTokenOutOfRange: it cannot run.
        """
        engine, tokenizer = self.engine, self.engine.tokenizer
        if isinstance(prompt, str):
            ids = tokenizer.encode(prompt) if prompt else []
        else:
            ids = list(prompt)
        if params.truncate_prompt_tokens is not None:
            ids = ids[-params.truncate_prompt_tokens :]
        limit, vocab_size = self.config.max_model_len, engine.plan.model.text_config.vocab_size
        assert limit is not None
        check_prompt(group, ids, vocab_size, limit)
        check_params(group, params, vocab_size)
        eos = engine.plan.model.eos_token_id
        bad = [s for word in params.bad_words for s in _word_sequences(tokenizer, word)]
        constraints = make_constraints(params, vocab_size, eos, bad)
        return [
            Request(
                group if params.n == 1 else f"{group}#{index}",
                ids,
                params,
                self._seed(group, ids, params, index),
                prompt if isinstance(prompt, str) else None,
                group=group,
                sample_index=index,
                text=OutputText(tokenizer, params),
                constraints=constraints,
            )
            for index in range(params.n)
        ]

    def _seed(self, group: str, ids: list[int], params: SamplingParams, index: int) -> int:
        name = group if index == 0 else f"{group}#{index}"
        if params.seed is None:
            return request_seed(self.config.seed, name, ids)
        return params.seed if index == 0 else request_seed(params.seed, f"#{index}", ids)

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
            finished = step(self.engine)
            for request in finished:
                del queued[request.request_id]
            for request in finished:
                self.metrics.record_finished(
                    request.request_id,
                    len(request.prompt_token_ids),
                    len(request.output_token_ids),
                    request.num_preemptions,
                )
                yield request

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


def _word_sequences(tokenizer: Tokenizer, word: str) -> list[list[int]]:
    """Encode a bad word as it stands at the start of a text and behind a space."""
    sequences = [tokenizer.encode(text)[1:] for text in (word, " " + word)]  # without the BOS
    return [s for s in sequences if s]
