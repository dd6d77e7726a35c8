"""Sampling parameters as static inputs: what a request forbids, how rows of a step are filled."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphs.bucket import Variant
from graphs.static_io import StaticInputs
from runtime.config import SamplingParams
from runtime.errors import NoTokenLeft
from runtime.launch import as_array
from runtime.request import Chunk, Request

_NEUTRAL = {
    "min_tokens": 0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": (),
    "allowed_token_ids": None,
    "banned_token_ids": (),
    "bad_words": (),
    "logprobs": None,
    "prompt_logprobs": None,
}


def is_plain(params: SamplingParams) -> bool:
    """Whether temperature, top_p, top_k and min_p are all that a request uses on the device."""
    return all(getattr(params, name) == value for name, value in _NEUTRAL.items())


def step_variant(chunks: Iterable[Chunk]) -> Variant:
    """Return the variant a step needs: the plain one unless a request of it asks for more.

    What a request does not use is neutral, so its tokens do not depend on the variant.
    """
    variant = Variant.SAMPLE
    for chunk in chunks:
        request = chunk.request
        if wants_prompt_logprobs(chunk):
            return Variant.SAMPLE_PROMPT
        if not is_plain(request.params):
            variant = Variant.SAMPLE_ALL
    return variant


def wants_prompt_logprobs(chunk: Chunk) -> bool:
    """Whether log-probabilities of prompt tokens come out of this chunk."""
    request = chunk.request
    if request.params.prompt_logprobs is None:
        return False
    known = len(request.prompt_logprobs or ())
    return chunk.end > max(known, 1) - 1 and known < len(request.prompt_token_ids)


@dataclass(frozen=True, slots=True)
class Constraints:
    """Tokens that a request may not draw.

    Args:
        allowed: bool [vocab], what holds for the whole output.
        ends: ids that end the request; forbidden before `min_tokens`.
        min_tokens: least number of output tokens.
        bad_sequences: token sequences of bad words; the last token of one is forbidden behind the
            others.
    """

    allowed: npt.NDArray[np.bool_]
    ends: tuple[int, ...]
    min_tokens: int
    bad_sequences: tuple[tuple[int, ...], ...]

    def mask(self, request: Request) -> npt.NDArray[np.int32]:
        """Return the mask of the next token, one bit per token, int32 [ceil(vocab / 32)].

        Raises:
            NoTokenLeft: every token is forbidden.
        """
        output = request.output_token_ids
        allowed = self.allowed.copy()
        if len(output) < self.min_tokens:
            allowed[list(self.ends)] = False
        for sequence in self.bad_sequences:
            head = sequence[:-1]
            if not head or tuple(output[-len(head) :]) == head:
                allowed[sequence[-1]] = False
        if not allowed.any():
            raise NoTokenLeft(request_id=request.request_id, position=len(output))
        padded = np.pad(allowed, (0, -len(allowed) % 32))
        return np.packbits(padded, bitorder="little").view("<i4")


def make_constraints(
    params: SamplingParams,
    vocab_size: int,
    eos_token_id: int | None,
    bad_sequences: Sequence[Sequence[int]],
) -> Constraints | None:
    """Collect what a request forbids; None if nothing.

    Args:
        params: ids in range.
        vocab_size: tokens of the model.
        eos_token_id: the end-of-sequence token.
        bad_sequences: encodings of `params.bad_words`.
    """
    restricts = params.allowed_token_ids is not None or params.banned_token_ids
    if not (restricts or params.min_tokens or bad_sequences):
        return None
    allowed = np.ones(vocab_size, dtype=np.bool_)
    if params.allowed_token_ids is not None:
        allowed[:] = False
        allowed[list(params.allowed_token_ids)] = True
    allowed[list(params.banned_token_ids)] = False
    ends = set(params.stop_token_ids)
    if eos_token_id is not None and not params.ignore_eos:
        ends.add(eos_token_id)
    sequences = tuple(tuple(s) for s in bad_sequences)
    return Constraints(allowed, tuple(sorted(ends)), params.min_tokens, sequences)


def pack_constraints(inputs: StaticInputs, sampled: Sequence[Chunk]) -> list[Request]:
    """Write what the sampled requests ask for beyond temperature, top_p, top_k and min_p.

    Args:
        inputs: static inputs of a bucket of variant SAMPLE_ALL or SAMPLE_PROMPT, cleared.
        sampled: chunks whose last rows are sampled, in order.
    Returns:
        requests whose constraints leave no token; their `error` says so.
    """
    failed = []
    views = {name: as_array(view) for name, view in inputs.views.items()}
    for row, chunk in enumerate(sampled):
        request, params = chunk.request, chunk.request.params
        views["sample_slots"][row] = request.slot
        views["prompt_lengths"][row] = len(request.prompt_token_ids)
        views["lengths"][row] = chunk.end
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            views[name][row] = getattr(params, name)
        for column, (token_id, bias) in enumerate(params.logit_bias):
            views["bias_ids"][row, column] = token_id
            views["bias_values"][row, column] = bias
        if request.constraints is None:
            continue
        try:
            views["token_mask"][row] = request.constraints.mask(request)
        except NoTokenLeft as error:
            request.error = error
            failed.append(request)
    return failed


def pack_targets(inputs: StaticInputs, chunks: Iterable[Chunk]) -> None:
    """Write the token behind every row, for its log-probability; 0 where none is known."""
    targets = as_array(inputs.views["targets"])
    row = 0
    for chunk in chunks:
        following = chunk.request.tokens_between(chunk.start + 1, chunk.end + 1)
        targets[row : row + len(following)] = following
        row += chunk.length
