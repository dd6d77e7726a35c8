"""Which tokens run next.

A step takes one token of every decoding request, oldest first, then chunks of prompts, oldest
first, until `max_num_batched_tokens` are planned. Requests are admitted in the order of arrival and
none is skipped.

Blocks are taken chunk by chunk. A request is admitted once the free blocks cover its known tokens
and one block for every running request that will still grow; this keeps preemption rare, it does
not exclude it. When a decode finds no free block, the newest running request gives its blocks and
slot back and returns to the front of the queue; its outputs are kept and computed again as part of
the prompt. A prompt that finds too few blocks is cut there and goes on when some are free.

Running requests are always older than waiting ones: admission is first come first served and the
victim is the newest. So the oldest one is never preempted, gets further in every step (alone it
fits, see `add`), and every request finishes.
"""

from collections import deque
from collections.abc import Sequence

from runtime.config import EngineConfig, SamplingParams
from runtime.errors import (
    DuplicateRequest,
    PromptTooLong,
    RequestNeverFits,
    SchedulerStalled,
    StalePlan,
    UnknownRequest,
)
from runtime.kv_cache import BlockPool, SlotPool
from runtime.request import Chunk, Request, RequestStatus, StepPlan


class Scheduler:
    """Plan steps and take their results.

    Args:
        config: resolved; max_model_len, max_num_seqs and max_num_batched_tokens are used.
        block_pool: key/value blocks.
        slot_pool: state slots.
        eos_token_id: ends a request unless it ignores it; None if the model has none.
    """

    def __init__(
        self,
        config: EngineConfig,
        block_pool: BlockPool,
        slot_pool: SlotPool,
        *,
        eos_token_id: int | None,
    ) -> None:
        assert config.max_model_len is not None, "the configuration must be resolved"
        assert config.max_num_seqs is not None, "the configuration must be resolved"
        assert config.max_num_batched_tokens is not None, "the configuration must be resolved"
        self._max_model_len = config.max_model_len
        self._max_num_seqs = config.max_num_seqs
        self._max_step_tokens = config.max_num_batched_tokens
        self._eos_token_id = eos_token_id
        self._blocks = block_pool
        self._slots = slot_pool
        self._waiting: deque[Request] = deque()
        self._running: dict[str, Request] = {}  # in order of arrival; the last one is the newest
        self._unfinished: dict[str, Request] = {}

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._unfinished)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones included."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return len(self._running)

    def add(self, request: Request) -> None:
        """Put a request at the end of the queue.

        Args:
            request: checked by `check_prompt`.
        Raises:
            DuplicateRequest, PromptTooLong, RequestNeverFits: see `check`.
        """
        self.check(request)
        self._unfinished[request.request_id] = request
        self._waiting.append(request)

    def check(self, request: Request) -> None:
        """Check that a request could be queued now.

        Raises:
            DuplicateRequest: its id is in use.
            PromptTooLong: no output token would fit under max_model_len.
            RequestNeverFits: it needs more blocks than the pool has, even alone.
        """
        if request.request_id in self._unfinished:
            raise DuplicateRequest(request_id=request.request_id)
        num_prompt_tokens = len(request.prompt_token_ids)
        if num_prompt_tokens >= self._max_model_len:
            raise PromptTooLong(
                request_id=request.request_id,
                num_tokens=num_prompt_tokens,
                limit=self._max_model_len - 1,
                max_model_len=self._max_model_len,
                reserved=1,
            )
        needed = self._final_blocks(request)
        if needed > self._blocks.num_usable:
            raise RequestNeverFits(
                request_id=request.request_id,
                num_prompt_tokens=num_prompt_tokens,
                max_tokens=min(request.params.max_tokens, self._max_model_len - num_prompt_tokens),
                needed=needed,
                block_size=self._blocks.block_size,
                usable=self._blocks.num_usable,
                kv_blocks=needed + 1,
            )

    def abort(self, request_id: str) -> Request:
        """End a request now; a plan that holds it may still be retired, its token is dropped.

        Returns:
            the request, finished with reason "abort".
        Raises:
            UnknownRequest: no unfinished request has this id.
        """
        request = self._unfinished.get(request_id)
        if request is None:
            raise UnknownRequest(request_id=request_id)
        if request.status is RequestStatus.WAITING:
            self._waiting.remove(request)
        self._finish(request, "abort")
        return request

    def schedule(self) -> StepPlan | None:
        """Plan the next step and take the blocks and slots that it needs.

        Retire a plan before asking for the next one.

        Returns:
            the plan, or None if no request is unfinished.
        """
        if not self._unfinished:
            return None
        chunks = self._plan_decodes()
        num_decode_tokens = len(chunks)
        self._plan_prompts(chunks, self._max_step_tokens - num_decode_tokens)
        if not chunks:
            raise SchedulerStalled(
                num_waiting=len(self._waiting),
                num_running=len(self._running),
                free_blocks=self._blocks.num_free,
            )
        num_tokens = sum(chunk.length for chunk in chunks)
        return StepPlan(
            chunks=tuple(chunks),
            num_tokens=num_tokens,
            num_sampled=sum(chunk.is_sampled for chunk in chunks),
            num_prefill_tokens=num_tokens - num_decode_tokens,
            num_decode_tokens=num_decode_tokens,
        )

    def retire(self, plan: StepPlan, sampled_token_ids: Sequence[int]) -> list[Request]:
        """Take the results of a step.

        A token goes to the output and, if the request has one, to its text, which may end it.

        Args:
            plan: what `schedule` returned.
            sampled_token_ids: one token for each sampled chunk, in order.
        Returns:
            the requests that this step finished, in the order of the plan.
        Raises:
            StalePlan: the plan was retired before, or the number of tokens is wrong.
        """
        if len(sampled_token_ids) != plan.num_sampled:
            raise StalePlan(
                what="sampled tokens", expected=plan.num_sampled, got=len(sampled_token_ids)
            )
        tokens = iter(sampled_token_ids)
        finished = []
        for chunk in plan.chunks:
            token_id = next(tokens) if chunk.is_sampled else None
            request = chunk.request
            if request.finish_reason == "abort":
                continue
            if request.num_computed != chunk.start or request.status is not RequestStatus.RUNNING:
                raise StalePlan(
                    what=f"request '{request.request_id}'",
                    expected=f"a running request with {chunk.start} computed tokens",
                    got=f"{request.status.value} with {request.num_computed}",
                )
            request.num_computed = chunk.end
            if token_id is None:
                continue
            request.output_token_ids.append(int(token_id))
            is_stopped = request.text is not None and request.text.append(int(token_id))
            reason = "stop" if is_stopped else self._finish_reason(request)
            if reason is not None:
                self._finish(request, reason)
                finished.append(request)
        return finished

    def _plan_decodes(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        for request in list(self._running.values()):
            if not request.is_decoding:  # a prompt, or a victim of an older request of this loop
                continue
            while not self._grow(request, request.num_tokens):
                # The newest running request has no chunk yet: this loop goes from old to new.
                if self._preempt_newest() is request:
                    break
            else:
                chunks.append(Chunk(request, request.num_computed, 1, True))
        return chunks

    def _plan_prompts(self, chunks: list[Chunk], budget: int) -> None:
        # Nobody is admitted behind an unfinished prompt, which takes the rest of the budget or of
        # the blocks: only the newest running request can be in the middle of one.
        newest = next(reversed(self._running.values()), None)
        if newest is not None and not newest.is_decoding:
            budget -= self._plan_prompt(newest, chunks, budget)
        num_growing = sum(self._is_growing(request) for request in self._running.values())
        while budget > 0 and self._waiting and len(self._running) < self._max_num_seqs:
            request = self._waiting[0]
            if self._blocks.num_free < self._blocks.blocks_for(request.num_tokens) + num_growing:
                break
            self._admit(self._waiting.popleft())
            budget -= self._plan_prompt(request, chunks, budget)
            num_growing += self._is_growing(request)

    def _plan_prompt(self, request: Request, chunks: list[Chunk], budget: int) -> int:
        """Plan as much of a prompt as budget and blocks allow; return the number of tokens."""
        start = request.num_computed
        room = (len(request.block_ids) + self._blocks.num_free) * self._blocks.block_size
        end = min(request.num_tokens, start + budget, room)
        if end == start:
            return 0  # older requests took every block: wait for one of them to end
        self._grow(request, end)
        chunks.append(Chunk(request, start, end - start, end == request.num_tokens))
        return end - start

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Give a request the blocks of its first tokens; False if they are not free."""
        missing = self._blocks.blocks_for(num_tokens) - len(request.block_ids)
        if missing > self._blocks.num_free:
            return False
        if missing > 0:
            request.block_ids += self._blocks.allocate(missing, request.request_id)
        return True

    def _admit(self, request: Request) -> None:
        request.slot = self._slots.allocate(request.request_id)
        request.status = RequestStatus.RUNNING
        self._running[request.request_id] = request

    def _preempt_newest(self) -> Request:
        request = next(reversed(self._running.values()))
        self._release(request)
        request.num_computed = 0
        request.num_preemptions += 1
        request.status = RequestStatus.WAITING
        self._waiting.appendleft(request)
        return request

    def _release(self, request: Request) -> None:
        del self._running[request.request_id]
        self._blocks.free(request.block_ids, request.request_id)
        request.block_ids = []
        self._slots.free(request.slot, request.request_id)
        request.slot = 0

    def _finish(self, request: Request, reason: str) -> None:
        if request.status is RequestStatus.RUNNING:
            self._release(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        if request.text is not None:
            request.text.finish()
        del self._unfinished[request.request_id]

    def _finish_reason(self, request: Request) -> str | None:
        params, num_output = request.params, len(request.output_token_ids)
        # The mask of the next token forbids ends as long: so many tokens come before one.
        if num_output > params.min_tokens and self._is_end(request.output_token_ids[-1], params):
            return "stop"
        if num_output >= params.max_tokens:
            return "length"
        return "length" if request.num_tokens >= self._max_model_len else None

    def _is_end(self, token_id: int, params: SamplingParams) -> bool:
        if token_id == self._eos_token_id and not params.ignore_eos:
            return True
        return token_id in params.stop_token_ids

    def _is_growing(self, request: Request) -> bool:
        return self._final_blocks(request) > len(request.block_ids)

    def _final_blocks(self, request: Request) -> int:
        """Blocks of a request at its longest; the last token it samples is never cached."""
        longest = len(request.prompt_token_ids) + request.params.max_tokens
        return self._blocks.blocks_for(min(longest, self._max_model_len) - 1)
