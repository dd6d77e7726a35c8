"""Reading of a step's results: sampled tokens and the log-probabilities that requests asked for."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from torch import Tensor

from runtime.errors import NonFiniteLogits
from runtime.launch import as_array
from runtime.request import Chunk, Request, StepPlan, TokenLogprob
from runtime.sampler import wants_prompt_logprobs

_PREFIX = "value.epilogue."


def sampled_tokens(results: Mapping[str, Tensor], plan: StepPlan) -> list[int]:
    """Return one token for each sampled chunk, in order."""
    tokens: list[int] = results[_PREFIX + "sampled"][: plan.num_sampled].tolist()
    return tokens


def fail_non_finite(results: Mapping[str, Tensor], plan: StepPlan) -> list[Request]:
    """Mark the requests whose logits are not finite and return them.

    A damaged weight makes such logits; sampling from them would look like a result.
    """
    logits = results[_PREFIX + "logits"][: plan.num_sampled]
    failed = []
    for request, is_good in zip(
        plan.sampled_requests, logits.isfinite().all(-1).tolist(), strict=True
    ):
        if not is_good and request.error is None:
            request.error = NonFiniteLogits(
                request_id=request.request_id, position=request.num_tokens
            )
            failed.append(request)
    return failed


def record_logprobs(results: Mapping[str, Tensor], plan: StepPlan, sampled: list[int]) -> None:
    """Add the step's log-probabilities to the requests that want them.

    Args:
        results: of a step of variant SAMPLE_ALL or SAMPLE_PROMPT.
        plan: not retired yet.
        sampled: what `sampled_tokens` returned.
    """
    reader = _Reader(results, "")
    for row, (request, token_id) in enumerate(zip(plan.sampled_requests, sampled, strict=True)):
        if request.params.logprobs is not None:
            entry = reader.entry(row, token_id, request.params.logprobs)
            request.logprobs = [*(request.logprobs or ()), entry]
    if _PREFIX + "prompt.logprob" in results:
        _record_prompt(_Reader(results, "prompt."), plan)


def _record_prompt(reader: "_Reader", plan: StepPlan) -> None:
    first = 0
    for chunk in plan.chunks:
        if wants_prompt_logprobs(chunk):
            _record_chunk(reader, chunk, first)
        first += chunk.length


def _record_chunk(reader: "_Reader", chunk: Chunk, first_row: int) -> None:
    request, count = chunk.request, chunk.request.params.prompt_logprobs
    assert count is not None
    known = list(request.prompt_logprobs or (None,))  # nothing predicts the first token
    prompt = request.prompt_token_ids
    for position in range(max(len(known), chunk.start + 1), min(chunk.end + 1, len(prompt))):
        row = first_row + position - 1 - chunk.start
        known.append(reader.entry(row, prompt[position], count))
    request.prompt_logprobs = known


class _Reader:
    """Rows of the four log-probability results."""

    def __init__(self, results: Mapping[str, Tensor], prefix: str) -> None:
        def array(name: str) -> npt.NDArray[np.generic]:
            return as_array(results[f"{_PREFIX}{prefix}{name}"])

        self._logprob, self._rank = array("logprob"), array("rank")
        self._top_ids, self._top = array("top_ids"), array("top_logprobs")

    def entry(self, row: int, token_id: int, count: int) -> TokenLogprob:
        top = zip(self._top_ids[row, :count].tolist(), self._top[row, :count].tolist(), strict=True)
        return TokenLogprob(
            token_id=token_id,
            logprob=self._logprob[row].item(),
            rank=self._rank[row].item(),
            top=tuple(top),
        )
