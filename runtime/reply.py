"""What comes out of a conversation: the reply, and its text while it grows."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from runtime.config import SamplingParams
from runtime.stops import OutputText

if TYPE_CHECKING:
    from model.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a reply asks for; `arguments` is JSON text unless the output was cut."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Reply:
    """An output, taken apart.

    Attributes:
        content: the answer; None if there are only tool calls.
        reasoning_content: what was thought before it, None outside thinking mode.
        tool_calls: in order.
        finish_reason: "stop", "length" or "tool_calls".
        num_reasoning_tokens: how many of the output's tokens were thought.
        logprobs: in the form of OpenAI, with a list for the reasoning; None unless asked for.
    """

    content: str | None
    reasoning_content: str | None
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    num_reasoning_tokens: int
    logprobs: dict[str, Any] | None

    def message(self) -> dict[str, Any]:
        """Return the reply as a message that a conversation can go on with."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return message


class ReplyText(OutputText):
    """The text of a reply, in which stop strings are searched behind the reasoning only.

    Special tokens are kept: the parser needs them. The end-of-sequence token is left out, which has
    no place in the reply.

    Args:
        tokenizer: of the checkpoint.
        params: of the request.
        eos_token_id: see above.
        thinking_end: the token that ends the reasoning, None if the reply has none.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        params: SamplingParams,
        *,
        eos_token_id: int,
        thinking_end: int | None,
    ) -> None:
        params = replace(params, skip_special_tokens=False)
        super().__init__(tokenizer, replace(params, stop=()))
        self._source = tokenizer
        self._all_params = params
        self._eos_token_id = None if params.ignore_eos else eos_token_id
        self._thinking_end = thinking_end
        self._num_thought = 0
        self._answer: OutputText | None = None
        if thinking_end is None:
            self._begin_answer()

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the reasoning so far; that which ends it is not counted."""
        return self._num_thought

    @property
    def text(self) -> str:
        """As in OutputText."""
        return super().text + ("" if self._answer is None else self._answer.text)

    def append(self, token_id: int) -> bool:
        """As in OutputText."""
        if token_id == self._eos_token_id:
            return False
        if self._answer is not None:
            has_ended = self._answer.append(token_id)
            self.stop = self._answer.stop
            return has_ended
        super().append(token_id)
        if token_id == self._thinking_end:
            self._begin_answer()
        else:
            self._num_thought += 1
        return False

    def finish(self) -> None:
        """As in OutputText."""
        super().finish()
        if self._answer is not None:
            self._answer.finish()

    def take(self) -> str:
        """As in OutputText."""
        return super().take() + ("" if self._answer is None else self._answer.take())

    def _begin_answer(self) -> None:
        super().finish()
        num_before = 0 if self._thinking_end is None else self._num_thought + 1
        rest = max(0, self._all_params.min_tokens - num_before)
        self._answer = OutputText(self._source, replace(self._all_params, min_tokens=rest))
