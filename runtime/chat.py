"""Chat: conversations to token ids, outputs to replies. The format is deepseek-recipe's business.

The library checks and renders conversations and takes replies apart; here is only what lies between
it and the engine. It comes with the extra `chat` and is imported when the first conversation is.
Its temperature and top_p for thinking mode are not used: a request is sampled as it says.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from runtime.config import SamplingParams
from runtime.errors import (
    BadChat,
    ChatExtraMissing,
    ChatNotEncodable,
    ChatUnsupported,
    ReplyUnreadable,
)
from runtime.fields import show
from runtime.reply import Reply, ReplyText, ToolCall
from runtime.request import Request

if TYPE_CHECKING:
    from deepseek_recipe import ConversationRequest, ParsingOptions

    from model.tokenizer import Tokenizer

CHAT_KEYS = ("messages", "tools", "tool_choice", "thinking", "reasoning_effort")

_MODEL = "DeepSeek-V4.1-Flash"  # the library's name of the format
_TOOL_CHOICES = (None, "none", "auto")


@dataclass(frozen=True, slots=True, eq=False)
class Chat:
    """A conversation that was checked.

    Attributes:
        request: the library's form of it.
    """

    request: "ConversationRequest"


def read_chat(fields: Mapping[str, Any], where: str) -> Chat:
    """Check a conversation; neither a model nor a tokenizer is needed.

    Args:
        fields: JSON values under CHAT_KEYS, `messages` at least, as in a request of OpenAI's chat
            completions; `thinking` is {"type": "enabled"} or {"type": "disabled"}. Of other keys
            only skip_special_tokens is refused, which a reply cannot obey.
        where: how messages name the source.
    Raises:
        BadChat: the library refuses it.
        ChatUnsupported: it has images, or asks for a certain tool.
        ChatExtraMissing: the library is not installed (exit code 3).
    """
    recipe = _library(where)
    if fields.get("tool_choice") not in _TOOL_CHOICES:
        what = f"tool_choice {show(fields['tool_choice'])}"
        raise ChatUnsupported(where=where, what=what, hint="Give 'none' or 'auto'.")
    if fields.get("skip_special_tokens") is not None:
        hint = "A reply is read with its special tokens; leave it out."
        raise ChatUnsupported(where=where, what="skip_special_tokens", hint=hint)
    body = {name: fields[name] for name in CHAT_KEYS if fields.get(name) is not None}
    try:
        request = recipe.ChatCompletionRequest({"model": _MODEL, **body})
        converted = request.convert(_conversion())
    except recipe.ConversionError as error:
        raise BadChat(where=where, reason=_conversion_reason(error)) from error
    except UnicodeEncodeError as error:
        raise BadChat(where=where, reason="half of a surrogate pair is no text") from error
    except (ValueError, OverflowError, RecursionError) as error:
        reason = str(error).removeprefix("invalid request body: ").rstrip(".")
        raise BadChat(where=where, reason=" ".join(reason.split())) from error
    if any(message.image_sources for message in converted.conversation.messages):
        raise ChatUnsupported(where=where, what="an image", hint="Give text alone.")
    return Chat(converted)


class ChatFormat:
    """The chat format over the tokenizer of a checkpoint.

    Args:
        tokenizer: of the checkpoint; the library reads its file a second time.
        eos_token_id: ends a reply and is no part of it.
    Raises:
        ChatExtraMissing: the library is not installed (exit code 3).
    """

    def __init__(self, tokenizer: "Tokenizer", eos_token_id: int) -> None:
        recipe = _library("chat")
        self._recipe = recipe
        self._tokenizer = tokenizer
        self._eos_token_id = eos_token_id
        self._library_tokenizer = recipe.Tokenizer.from_file(str(tokenizer.path))
        self._encoding = recipe.DeepseekV41Encoding().with_tokenizer(self._library_tokenizer)
        end = self._library_tokenizer.encode(recipe.SpecialToken.ThinkingEnd.default_str())
        self._thinking_end: int | None = end[0] if len(end) == 1 else None

    def encode(self, chat: Chat, request_id: str) -> list[int]:
        """Return the token ids of a conversation, ready to be completed.

        Names of special tokens inside a message stay text.

        Raises:
            ChatNotEncodable: the tokenizer lacks tokens of the format.
        """
        try:
            ids: list[int] = self._encoding.encode(chat.request.conversation)
        except RuntimeError as error:
            reason = self._missing(chat) or str(error)
            raise ChatNotEncodable(
                request_id=request_id, path=self._tokenizer.path, reason=reason
            ) from error
        return ids

    def output_text(self, chat: Chat, params: SamplingParams) -> ReplyText:
        """Return what a request of this conversation must have as its `text`."""
        stage = chat.request.parsing_options.thinking_initial_stage
        is_thinking = stage is not None and stage.starts_in_reasoning()
        return ReplyText(
            self._tokenizer,
            params,
            eos_token_id=self._eos_token_id,
            thinking_end=self._thinking_end if is_thinking else None,
        )

    def reply(self, chat: Chat, request: Request, call_prefix: str) -> Reply:
        """Take the output of a finished request apart.

        Args:
            chat: its conversation.
            request: its text is of `output_text`.
            call_prefix: ids of tool calls are this and the place of the call.
        Raises:
            ReplyUnreadable: the library gives up.
        """
        assert isinstance(request.text, ReplyText), "it was made by `output_text`"
        try:
            text = self._recipe.InferenceChunk.text(request.text.text)
            choice = self._parse(chat, request, text, chat.request.parsing_options)
            logprobs = None if request.logprobs is None else self._logprobs(chat, request)
        except RuntimeError as error:
            raise ReplyUnreadable(request_id=request.group, reason=str(error)) from error
        message = choice["message"]
        calls = tuple(
            ToolCall(f"{call_prefix}_{place}", call["function"]["name"], _arguments(call))
            for place, call in enumerate(message.get("tool_calls") or ())
        )
        return Reply(
            content=message.get("content") or (None if calls else ""),
            reasoning_content=message.get("reasoning_content"),
            tool_calls=calls,
            finish_reason=choice["finish_reason"],
            num_reasoning_tokens=request.text.num_reasoning_tokens,
            logprobs=logprobs,
        )

    def _parse(
        self, chat: Chat, request: Request, chunk: Any, options: "ParsingOptions"
    ) -> dict[str, Any]:
        """Run an output through the library and return the choice of its response."""
        recipe = self._recipe
        generator = recipe.ChatCompletionRequest.chunk_generator(chat.request, "", "")
        processor = recipe.StreamProcessor(generator, options, self._library_tokenizer)
        reasons = recipe.InferenceFinishReason
        reason = reasons.Length if request.finish_reason == "length" else reasons.Stop
        events = []
        for item in (recipe.InferenceChunk.ready(), chunk, recipe.InferenceChunk.finish(reason)):
            if not processor.finished:  # a stop string ends it early
                events += processor.push(item)
        events += processor.finish()
        response = recipe.ChatCompletionResponse("", "", 0, 0, 0)
        for event in events:
            response.accumulate(event)
        choice: dict[str, Any] = json.loads(response.to_json())["choices"][0]
        return choice

    def _logprobs(self, chat: Chat, request: Request) -> dict[str, Any]:
        """Return the log-probabilities of an output, those of reasoning and answer apart.

        The output goes through the library once more, token by token: it knows what each belongs
        to. The text is not read that way because the engine alone knows where it was cut.
        """
        ids = request.output_token_ids
        if ids and ids[-1] == self._eos_token_id and not request.params.ignore_eos:
            ids = ids[:-1]
        entries = [(entry.logprob, entry.top) for entry in (request.logprobs or ())[: len(ids)]]
        chunk = self._recipe.InferenceChunk.tokens(ids, entries)
        parsed = self._parse(chat, request, chunk, _cut(chat, request))["logprobs"] or {}
        lists = {name: value for name, value in parsed.items() if value is not None}
        return {"content": [], "refusal": None, **lists}

    def _missing(self, chat: Chat) -> str:
        """Return which special tokens of a conversation the tokenizer lacks, in words."""
        rendered = self._encoding.render_conversation(chat.request.conversation)
        spellings = dict.fromkeys(rendered.prompt[a:b] for a, b in rendered.special_ranges)
        missing = [word for word in spellings if len(self._library_tokenizer.encode(word)) != 1]
        return f"it lacks the special tokens {', '.join(map(show, missing))}" if missing else ""


def _library(where: str) -> ModuleType:
    try:
        import deepseek_recipe
    except ImportError as error:
        raise ChatExtraMissing(where=where, reason=str(error)) from error
    return deepseek_recipe


@functools.cache
def _conversion() -> Any:
    import deepseek_recipe

    return deepseek_recipe.ConversionOptions()


def _conversion_reason(error: Any) -> str:
    # The body is what the library's service would answer over HTTP.
    reason = str(json.loads(error.body)["error"]["message"])
    return " ".join(reason.split()).rstrip(".")


def _cut(chat: Chat, request: Request) -> "ParsingOptions":
    """Return options under which the library cuts tokens where the text was cut."""
    options = chat.request.parsing_options
    stop = request.text.stop if request.text is not None else None
    if stop is not None and not request.params.include_stop_str_in_output:
        options.stop_sequences = [stop]
    return options


def _arguments(call: Mapping[str, Any]) -> str:
    return str(call["function"].get("arguments") or "")
