"""A request, the chunk of it that one step computes, and the plan of a step."""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from graphs.errors import EngineError
from runtime.config import SamplingParams
from runtime.errors import EmptyPrompt, ParamTokenOutOfRange, PromptTooLong, TokenOutOfRange

if TYPE_CHECKING:
    from runtime.sampler import Constraints
    from runtime.stops import OutputText


class RequestStatus(Enum):
    """Where a request is: queued (again, after a preemption), holding a slot, or done."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of a token under the unfiltered distribution, natural logarithm.

    Attributes:
        token_id: the token of the output or prompt.
        logprob: its log-probability.
        rank: 1 for the most likely token, ties to the lower id.
        top: (token id, log-probability) of the most likely tokens, falling.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True, eq=False)
class Request:
    """One prompt on its way to an output.

    Whoever makes the request fills the fields up to `constraints`; only the engine's step and the
    scheduler write those below.

    Attributes:
        request_id: unique among the unfinished requests.
        prompt_token_ids: the encoded prompt, at least one id.
        params: how to sample and when to end.
        seed: seed of the random draws, fits int64; see `request_seed`.
        prompt: the text, if the request came as text.
        group: id of the job whose outputs belong together, by default the request's own id.
        sample_index: place of this output among those of its group.
        text: its decoded output, which finds stop strings; None leaves decoding to the reader.
        constraints: tokens it may not draw, None if it may draw all.
        output_token_ids: sampled so far; kept across preemptions; the stop token is part of it.
        num_computed: tokens whose state is in the caches, counted from the first prompt token.
        slot: index of the per-request state, 0 while it has none.
        block_ids: key/value blocks in order of position.
        status: see RequestStatus.
        finish_reason: "stop", "length" or "abort" once finished.
        num_preemptions: how often its state was dropped to be computed again.
        error: why it could not go on; its finish_reason is "abort" then.
        logprobs: one entry for each output token, None unless asked for.
        prompt_logprobs: one entry for each prompt token, None for the first; None unless asked for.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    prompt: str | None = None
    group: str = ""
    sample_index: int = 0
    text: "OutputText | None" = None
    constraints: "Constraints | None" = None
    output_token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    slot: int = 0
    block_ids: list[int] = field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: str | None = None
    num_preemptions: int = 0
    error: EngineError | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None

    def __post_init__(self) -> None:
        """A request that is no part of a group is one of its own."""
        self.group = self.group or self.request_id

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output in one new list; `tokens_between` is cheaper for a part."""
        return self.prompt_token_ids + self.output_token_ids

    @property
    def num_tokens(self) -> int:
        """Number of known tokens, prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_remaining(self) -> int:
        """Number of known tokens whose state is not in the caches; at least 1 while unfinished."""
        return self.num_tokens - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether only the token sampled last is missing from the caches."""
        return bool(self.output_token_ids) and self.num_remaining == 1

    def tokens_between(self, start: int, end: int) -> list[int]:
        """Return the known tokens at positions start .. end-1 without building all of them."""
        num_prompt = len(self.prompt_token_ids)
        head = self.prompt_token_ids[start:end] if start < num_prompt else []
        if end <= num_prompt:
            return head
        return head + self.output_token_ids[max(start - num_prompt, 0) : end - num_prompt]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one request that a step computes.

    Attributes:
        request: whose tokens.
        start: position of the first one.
        length: how many, at least 1.
        is_sampled: the chunk reaches the last known token, so its last row's logits are sampled.
    """

    request: Request
    start: int
    length: int
    is_sampled: bool

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.start + self.length

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the chunk."""
        return self.request.tokens_between(self.start, self.end)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes: decodes first, oldest first, then chunks of prompts.

    Attributes:
        chunks: at most one for each request, at least one in all.
        num_tokens: rows of the step; the sum of the two below.
        num_sampled: tokens the step samples, in the order of the sampled chunks.
        num_prefill_tokens: tokens of prompts, and of outputs that are computed again after a
            preemption.
        num_decode_tokens: tokens that were sampled by an earlier step and are computed for the
            first time.
    """

    chunks: tuple[Chunk, ...]
    num_tokens: int
    num_sampled: int
    num_prefill_tokens: int
    num_decode_tokens: int

    @property
    def sampled_requests(self) -> list[Request]:
        """The requests that get a token, in the order `Scheduler.retire` expects the tokens."""
        return [chunk.request for chunk in self.chunks if chunk.is_sampled]


def request_seed(engine_seed: int, request_id: str, prompt_token_ids: Sequence[int]) -> int:
    """Derive the seed of a request that names none.

    The result depends on the configuration and the request alone: not on arrival order, batch or
        process.

    Args:
        engine_seed: EngineConfig.seed.
        request_id: the id as written to the result.
        prompt_token_ids: the encoded prompt.
    Returns:
        64 bits as a signed integer, so that it fits an int64 tensor.
    Source: BLAKE2b (RFC 7693) with 8 bytes of digest; every part is written with its length.
    """
    name = request_id.encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(digest_size=8, person=b"request-seed-v1")
    digest.update(struct.pack("<qQ", engine_seed, len(name)))
    digest.update(name)
    digest.update(
        struct.pack(f"<Q{len(prompt_token_ids)}q", len(prompt_token_ids), *prompt_token_ids)
    )
    return int.from_bytes(digest.digest(), "little", signed=True)


def check_prompt(
    request_id: str,
    prompt_token_ids: Sequence[int],
    vocab_size: int,
    max_model_len: int,
    *,
    reserved: int = 1,
) -> None:
    """Check an encoded prompt at the edge where it enters the engine.

    Args:
        request_id: for the messages.
        prompt_token_ids: the encoded prompt.
        vocab_size: ids must be below it.
        max_model_len: limit of prompt and output together, tokens.
        reserved: tokens left for the output; 0 where nothing is generated.
    Raises:
        EmptyPrompt, PromptTooLong, TokenOutOfRange: the request cannot run.
    """
    if not prompt_token_ids:
        raise EmptyPrompt(request_id=request_id)
    if len(prompt_token_ids) > max_model_len - reserved:
        raise PromptTooLong(
            request_id=request_id,
            num_tokens=len(prompt_token_ids),
            limit=max_model_len - reserved,
            max_model_len=max_model_len,
            reserved=reserved,
        )
    if min(prompt_token_ids) >= 0 and max(prompt_token_ids) < vocab_size:
        return
    for position, token_id in enumerate(prompt_token_ids):
        if not 0 <= token_id < vocab_size:
            raise TokenOutOfRange(
                request_id=request_id, position=position, token_id=token_id, vocab_size=vocab_size
            )


def check_params(request_id: str, params: SamplingParams, vocab_size: int) -> None:
    """Check the token ids of sampling parameters, whose range only the model knows.

    Args:
        request_id: for the message.
        params: the parameters of the request.
        vocab_size: ids must be below it.
    Raises:
        ParamTokenOutOfRange: an id in logit_bias, allowed_token_ids, banned_token_ids or
            stop_token_ids is not in the vocabulary.
    """
    named = {
        "logit_bias": [token_id for token_id, _ in params.logit_bias],
        "allowed_token_ids": params.allowed_token_ids or (),
        "banned_token_ids": params.banned_token_ids,
        "stop_token_ids": params.stop_token_ids,
    }
    for name, token_ids in named.items():
        for token_id in token_ids:
            if token_id >= vocab_size:
                raise ParamTokenOutOfRange(
                    request_id=request_id, field=name, token_id=token_id, vocab_size=vocab_size
                )
