"""Lines of OpenAI's batch files, read as requests; `runtime.openai_response` answers them.

A line has `custom_id`, `method` POST, a `url` of chat completions or completions, and a `body`. In
the body every sampling setting may stand under its own name too. What the body leaves out has the
job's default, but a chat completion without a limit runs to max_model_len, as at OpenAI, unless the
job's default of max_tokens was changed. `model` is echoed, not checked.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from runtime.chat import CHAT_KEYS, Chat, read_chat
from runtime.config import INT32_MAX, SamplingParams
from runtime.errors import (
    BadBatchField,
    BadPrompt,
    BatchFieldUnsupported,
    EmptyPrompt,
    UnknownField,
)
from runtime.fields import fields_by_name, is_text, nearest, show

CHAT_URL, COMPLETIONS_URL = "/v1/chat/completions", "/v1/completions"
_LINE_KEYS = ("custom_id", "method", "url", "body")
_PASSED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
# Values of the API that change nothing here; every other one is refused. Null is always fine.
_LATER = "not supported yet"
_FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "stream": ((False,), "a batch has no streams"),
    "stream_options": ((), "a batch has no streams"),
    "response_format": (({"type": "text"},), _LATER),
    "modalities": ((["text"],), _LATER),
    "parallel_tool_calls": ((True,), _LATER),
    "functions": ((), "it is out of date; use tools"),
    "function_call": ((), "it is out of date; use tool_choice"),
    "echo": ((False,), _LATER),
    "suffix": ((), _LATER),
}
_CHAT_ONLY = ("response_format", "modalities", "parallel_tool_calls", "functions", "function_call")
_COMPLETIONS_ONLY = ("echo", "suffix")
_SAMPLING = tuple(fields_by_name(SamplingParams))
_KNOWN = {
    CHAT_URL: frozenset(
        {"model", *CHAT_KEYS, *_PASSED, *_FIXED, *_SAMPLING, "max_completion_tokens"}
        | {"top_logprobs"}
    ).difference(_COMPLETIONS_ONLY),
    COMPLETIONS_URL: frozenset(
        {"model", "prompt", "best_of", *_PASSED, *_FIXED, *_SAMPLING}
    ).difference(_CHAT_ONLY),
}
_OWN_KEYS = frozenset({"model", "prompt", *CHAT_KEYS, *_PASSED})


@dataclass(frozen=True, slots=True)
class BatchHead:
    """What a response says about its request.

    Attributes:
        digest: of the whole line, hexadecimal.
        custom_id: None if the line has none that can be used.
        url: one of the two, or empty in the head of a bad line.
        model: echoed.
    """

    digest: str
    custom_id: str | None
    url: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A line that can be run; one of prompt, prompt_token_ids and chat is not None."""

    head: BatchHead
    params: SamplingParams
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    chat: Chat | None = None


def is_batch_line(fields: Mapping[str, Any]) -> bool:
    """Whether an object is meant as a line of a batch file."""
    return any(name in fields for name in _LINE_KEYS)


def batch_head(fields: Mapping[str, Any]) -> BatchHead:
    """Return what can be said about any line of a batch file, good or bad."""
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    custom_id = fields.get("custom_id")
    is_usable = isinstance(custom_id, str) and custom_id and is_text(custom_id)
    digest = hashlib.blake2b(canonical, digest_size=12, person=b"batch-line-v1").hexdigest()
    return BatchHead(digest, custom_id if is_usable else None)


def read_batch_line(
    fields: Mapping[str, Any], head: BatchHead, number: int, defaults: SamplingParams
) -> BatchRequest:
    """Check a line of a batch file.

    Args:
        fields: the object of the line.
        head: what `batch_head` returned.
        number: 1-based line, for messages.
        defaults: sampling parameters of bodies that say nothing.
    Raises:
        BadBatchField, BatchFieldUnsupported, UnknownField, BadPrompt, EmptyPrompt, BadChat,
            ChatUnsupported, FieldTypeError, FieldRangeError, FieldConflict: it cannot be run.
        ChatExtraMissing: it is a chat, and the extra is not installed.
    """
    head, body = _read_head(fields, head, number)
    where = f"line {number}, body"
    values = _sampling_values(body, _KNOWN[head.url], number, where)
    if head.url == CHAT_URL:
        values = _chat_values(values, number, defaults)
        params = SamplingParams.from_mapping(values, defaults, where=where)
        return BatchRequest(head, params, chat=read_chat(body, where))
    best_of = values.pop("best_of", None)
    params = SamplingParams.from_mapping(values, defaults, where=where)
    if best_of is not None and (type(best_of) is not int or best_of != params.n):
        _refuse_value(number, "best_of", best_of, "only the value of n is supported")
    prompt, token_ids = _completion_prompt(body.get("prompt"), number, head.custom_id or "")
    return BatchRequest(head, params, prompt, token_ids)


def _read_head(
    fields: Mapping[str, Any], head: BatchHead, number: int
) -> tuple[BatchHead, dict[str, Any]]:
    """Check what stands around the body; return the whole head and the body."""
    if head.custom_id is None:
        _refuse(number, "custom_id", "a non-empty string", fields.get("custom_id"))
    for name in fields:
        if name not in _LINE_KEYS:
            hint = nearest(name, _LINE_KEYS)
            raise UnknownField(where=f"line {number}", field=name, nearest=hint)
    if fields.get("method") != "POST":
        _refuse(number, "method", "'POST'", fields.get("method"))
    url, body = fields.get("url"), fields.get("body")
    if url not in (CHAT_URL, COMPLETIONS_URL):
        _refuse(number, "url", f"'{CHAT_URL}' or '{COMPLETIONS_URL}'", url)
    if not isinstance(body, dict):
        _refuse(number, "body", "an object", body)
    model = body.get("model")
    if not isinstance(model, str) or not model or not is_text(model):
        _refuse(number, "body.model", "a non-empty string", model)
    return BatchHead(head.digest, head.custom_id, url, model), body


def _refuse(number: int, field: str, expected: str, got: Any) -> NoReturn:
    raise BadBatchField(line=number, field=field, expected=expected, got=show(got))


def _refuse_value(number: int, field: str, value: Any, reason: str) -> NoReturn:
    raise BatchFieldUnsupported(line=number, field=field, value=show(value), reason=reason)


def _sampling_values(
    body: Mapping[str, Any], known: frozenset[str], number: int, where: str
) -> dict[str, Any]:
    """Return what a body says about sampling; null means what silence means."""
    values = {}
    for name, value in body.items():
        if name not in known:
            raise UnknownField(where=where, field=name, nearest=nearest(name, known))
        if name in _OWN_KEYS or value is None:
            continue
        if name not in _FIXED:
            values[name] = value
            continue
        allowed, reason = _FIXED[name]
        if not any(type(value) is type(same) and value == same for same in allowed):
            _refuse_value(number, name, value, reason)
    return values


def _chat_values(values: dict[str, Any], number: int, defaults: SamplingParams) -> dict[str, Any]:
    """Translate what chat completions call differently."""
    limit = values.pop("max_completion_tokens", None)
    if limit is not None and values.setdefault("max_tokens", limit) != limit:
        expected = f"the same as max_tokens, {show(values['max_tokens'])}"
        _refuse(number, "body.max_completion_tokens", expected, limit)
    if "max_tokens" not in values and defaults.max_tokens == SamplingParams().max_tokens:
        values["max_tokens"] = INT32_MAX
    is_wanted, top = values.pop("logprobs", False), values.pop("top_logprobs", None)
    if type(is_wanted) is not bool:
        _refuse(number, "body.logprobs", "true or false", is_wanted)
    if top is not None and (type(top) is not int or not is_wanted):
        _refuse(number, "body.top_logprobs", "an integer, beside logprobs true", top)
    if is_wanted:
        values["logprobs"] = top or 0
    return values


def _completion_prompt(
    value: Any, number: int, request_id: str
) -> tuple[str | None, list[int] | None]:
    if isinstance(value, list) and value and all(isinstance(part, str | list) for part in value):
        if len(value) > 1:
            reason = "a line has one prompt; write a line for each"
            _refuse_value(number, "prompt", f"{len(value)} prompts", reason)
        value = value[0]
    is_ids = isinstance(value, list) and all(type(item) is int for item in value)
    if not is_ids and not (isinstance(value, str) and is_text(value)):
        raise BadPrompt(
            line=number,
            field="body.prompt",
            expected="a string of valid text or a list of token ids",
            got=show(value),
        )
    if not value:
        raise EmptyPrompt(request_id=request_id)
    return (None, value) if is_ids else (value, None)
