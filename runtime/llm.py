"""LLM: the Python interface."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from graphs.errors import EngineError
from model.tokenizer import Tokenizer
from runtime.chat import Chat, ChatFormat, read_chat
from runtime.config import EngineConfig, SamplingParams
from runtime.engine import Engine, EnginePlan, LoadProgress, plan_engine, step
from runtime.errors import (
    EngineBusy,
    ParamsCountMismatch,
    ParamsTypeError,
    PromptTypeError,
    UnknownField,
)
from runtime.fields import fields_by_name, nearest
from runtime.metrics import Metrics
from runtime.output import ChatOutput, DeltaReader, RequestOutput, TextDelta, request_output
from runtime.request import Request, check_params, check_prompt, request_seed
from runtime.sampler import make_constraints
from runtime.stops import OutputText

Prompt = str | Sequence[int]
Message = Mapping[str, Any]

_SAMPLE_MARK = "\x1f"  # between a group and the index of one of its samples: no id holds it


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
        model: str | os.PathLike[str] | EngineConfig | None = None,
        *,
        progress: LoadProgress | None = None,
        **settings: Any,
    ) -> None:
        if not isinstance(model, EngineConfig):
            model = EngineConfig(model=None if model is None else os.fspath(model))
        for name in settings:
            if name not in fields_by_name(EngineConfig):
                known = fields_by_name(EngineConfig)
                raise UnknownField(where="LLM", field=name, nearest=nearest(name, known))
        plan = plan_engine(dataclasses.replace(model, **settings))
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
        self._queued: dict[str, Request] = {}

    @property
    def config(self) -> EngineConfig:
        """The resolved configuration."""
        return self.engine.plan.config

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Abort what still runs; the object may be used again."""
        for request_id in list(self._queued):
            self.abort(request_id)

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
        groups = self._prepare(prompts, sampling_params)
        self._run_groups(groups)
        return [request_output(group) for group in groups]

    def _run_groups(self, groups: Sequence[Sequence[Request]]) -> None:
        requests = [request for group in groups for request in group]
        self._check(requests)
        for request in self.run(requests):
            if request.error is not None:
                raise request.error

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | None = None,
        **options: Any,
    ) -> list[ChatOutput]:
        """Answer conversations; results come in their order.

        Args:
            conversations: messages of one conversation, or a list of such lists, in OpenAI's form.
            sampling_params: of every reply; skip_special_tokens is ignored.
            **options: tools, tool_choice, thinking, reasoning_effort, as in a batch line.
        Raises:
            BadChat, ChatUnsupported, ChatNotEncodable, ChatExtraMissing: a conversation that cannot
                run; nothing ran.
            the errors of `generate`.
        """
        params = sampling_params or SamplingParams()
        listed = [conversations] if _is_one_conversation(conversations) else conversations
        chats = [
            read_chat({**options, "messages": list(messages)}, f"conversation {index}")
            for index, messages in enumerate(listed)
        ]
        groups = [self.make_chat_requests(str(i), chat, params) for i, chat in enumerate(chats)]
        self._run_groups(groups)
        return [
            ChatOutput(
                request_output(group),
                [
                    self.chat_format.reply(chat, r, f"call_{r.group}_{r.sample_index}")
                    for r in group
                ],
            )
            for chat, group in zip(chats, groups, strict=True)
        ]

    def make_chat_requests(self, group: str, chat: Chat, params: SamplingParams) -> list[Request]:
        """Encode and check one conversation, as `make_requests` does a prompt.

        Raises:
            ChatNotEncodable: the tokenizer lacks tokens of the format.
            the errors of `make_requests`.
        """
        token_ids = self.chat_format.encode(chat, group)
        requests = self.make_requests(group, token_ids, params)
        for request in requests:
            request.text = self.chat_format.output_text(chat, params)
        return requests

    @functools.cached_property
    def chat_format(self) -> ChatFormat:
        """The chat format over this model's tokenizer."""
        return ChatFormat(self.engine.tokenizer, self.engine.plan.model.eos_token_id)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[TextDelta]:
        """Complete prompts and yield what each step adds; arguments and errors as in `generate`."""
        requests = [r for group in self._prepare(prompts, sampling_params) for r in group]
        self._check(requests)
        readers = [DeltaReader(request) for request in requests]
        with contextlib.closing(self._steps(iter(requests), None)) as steps:
            for _ in steps:
                for request, reader in zip(requests, readers, strict=True):
                    if request.error is not None:
                        raise request.error
                    delta = reader.read()
                    if delta is not None:
                        yield delta

    def abort(self, request_id: str) -> None:
        """End a queued or running request; its result has finish_reason "abort".

        Raises:
            UnknownRequest: no unfinished request has this id.
        """
        self.engine.scheduler.abort(request_id)
        self._queued.pop(request_id, None)

    def _prepare(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[list[Request]]:
        listed = _as_list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(listed)
        else:
            params = list(sampling_params)
        for index, own in enumerate(params):
            if not isinstance(own, SamplingParams):
                raise ParamsTypeError(index=index, got=type(own).__name__)
        if len(params) != len(listed):
            raise ParamsCountMismatch(num_params=len(params), num_prompts=len(listed))
        return [
            self.make_requests(str(index), prompt, own)
            for index, (prompt, own) in enumerate(zip(listed, params, strict=True))
        ]

    def make_requests(self, group: str, prompt: Prompt, params: SamplingParams) -> list[Request]:
        """Encode and check one prompt; it becomes `params.n` requests.

        Args:
            group: id of the prompt; the only request's id, or the head of its samples' ids.
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
                group if params.n == 1 else f"{group}{_SAMPLE_MARK}{index}",
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
            requests: made by `make_requests`; ids must be unique.
            refuse: called for a request that cannot be queued; without it the error is raised.
        """
        with contextlib.closing(self._steps(iter(requests), refuse)) as steps:
            for finished in steps:
                yield from finished

    def _steps(
        self,
        pending: Iterator[Request],
        refuse: Callable[[Request, EngineError], None] | None,
    ) -> Generator[list[Request], None, None]:
        """Run everything; yield what each step finished."""
        scheduler, is_open = self.engine.scheduler, True
        self._check(())
        try:
            while is_open or scheduler.has_work:
                while is_open and scheduler.num_waiting < max(1, self.config.max_num_seqs or 1):
                    request = next(pending, None)
                    is_open = request is not None
                    if request is not None:
                        self._enqueue(request, refuse)
                finished = step(self.engine)
                for request in finished:
                    self._note_finished(request)
                yield finished
        finally:
            self.close()  # left early: nothing of this call may stay behind
        self.engine.blocks.check_idle()
        self.engine.slots.check_idle()

    def _check(self, requests: Iterable[Request]) -> None:
        """Check that nothing else runs and that every request could be queued."""
        if self._queued:
            raise EngineBusy(num_requests=len(self._queued))
        for request in requests:
            self.engine.scheduler.check(request)

    def _note_finished(self, request: Request) -> None:
        self._queued.pop(request.request_id, None)
        self.metrics.record_finished(
            request.request_id,
            len(request.prompt_token_ids),
            len(request.output_token_ids),
            request.num_preemptions,
        )

    def _enqueue(
        self, request: Request, refuse: Callable[[Request, EngineError], None] | None
    ) -> None:
        try:
            self.engine.scheduler.add(request)
        except EngineError as error:
            if refuse is None:
                raise
            refuse(request, error)
        else:
            self._queued[request.request_id] = request
            self.metrics.record_arrival(request.request_id)


def _is_one_conversation(conversations: Sequence[Any]) -> TypeGuard[Sequence[Message]]:
    return bool(conversations) and isinstance(conversations[0], Mapping)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    given: Any = prompts
    if not isinstance(given, Sequence) or isinstance(given, bytes):
        raise PromptTypeError(index=0, got=type(given).__name__)
    items: list[Any] = list(given)
    if items and all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        return [items]
    for index, item in enumerate(items):
        is_ids = (
            isinstance(item, Sequence)
            and not isinstance(item, bytes)
            and all(isinstance(i, int) and not isinstance(i, bool) for i in item)
        )
        if not (isinstance(item, str) or is_ids):
            raise PromptTypeError(index=index, got=type(item).__name__)
    return items


def _word_sequences(tokenizer: Tokenizer, word: str) -> list[list[int]]:
    """Encode a bad word as it stands at the start of a text and behind a space."""
    sequences = [tokenizer.encode(text)[1:] for text in (word, " " + word)]  # without the BOS
    return [s for s in sequences if s]
