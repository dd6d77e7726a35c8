"""Results of the Python interface."""

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.reply import Reply
from runtime.request import Request, TokenLogprob


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


@dataclass(frozen=True, slots=True)
class ChatOutput:
    """The result of one conversation.

    Args:
        output: tokens, texts and log-probabilities as in `generate`.
        replies: the same outputs taken apart: content, reasoning_content, tool_calls.
    """

    output: RequestOutput
    replies: list[Reply]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one step added to one output.

    Args:
        request_id: place of the prompt in the call, as text.
        index: place of the output among the prompt's outputs.
        text: new text, whole characters only; text that may begin a stop string waits.
        token_ids: new tokens.
        finish_reason: None until the last delta of the output.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None


class DeltaReader:
    """Reads what is new of one request."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._num_tokens = 0
        self._is_done = False

    def read(self) -> TextDelta | None:
        """Return what came since the last call; None if nothing did, or all was read."""
        request = self._request
        tokens = request.output_token_ids[self._num_tokens :]
        if self._is_done or not (tokens or request.finish_reason):
            return None
        text = "" if request.text is None else request.text.take()
        self._num_tokens += len(tokens)
        self._is_done = request.finish_reason is not None
        return TextDelta(request.group, request.sample_index, text, tokens, request.finish_reason)
