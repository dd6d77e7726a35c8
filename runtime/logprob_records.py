"""Log-probabilities of requests as JSON values: our own form, and that of OpenAI's completions."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from runtime.request import Request, TokenLogprob
from runtime.stops import OutputText

if TYPE_CHECKING:
    from model.tokenizer import Tokenizer


def logprob_record(entry: TokenLogprob, tokenizer: "Tokenizer") -> dict[str, Any]:
    """Return a token with its log-probability, and the likeliest tokens beside it."""
    top = [_token(token_id, logprob, tokenizer) for token_id, logprob in entry.top]
    return {**_token(entry.token_id, entry.logprob, tokenizer), "top": top}


def prompt_logprob_records(request: Request, tokenizer: "Tokenizer") -> list[Any]:
    """Return one record for each prompt token, null for the first."""
    entries = request.prompt_logprobs or ()
    return [None if entry is None else logprob_record(entry, tokenizer) for entry in entries]


def completion_logprobs(request: Request, tokenizer: "Tokenizer") -> dict[str, Any] | None:
    """Return the log-probabilities of an output as OpenAI's completions have them.

    Tokens that look alike, such as pieces of characters, share a key; the likeliest keeps it.
    """
    if request.logprobs is None:
        return None
    return {
        "tokens": [_text(entry.token_id, tokenizer) for entry in request.logprobs],
        "token_logprobs": [entry.logprob for entry in request.logprobs],
        "top_logprobs": [_top(entry, tokenizer) for entry in request.logprobs],
        "text_offset": _offsets(request, tokenizer),
    }


def _top(entry: TokenLogprob, tokenizer: "Tokenizer") -> dict[str, float]:
    top: dict[str, float] = {}
    for token_id, logprob in entry.top:
        top.setdefault(_text(token_id, tokenizer), logprob)
    return top


def _token(token_id: int, logprob: float, tokenizer: "Tokenizer") -> dict[str, Any]:
    return {"token_id": token_id, "token": _text(token_id, tokenizer), "logprob": logprob}


def _text(token_id: int, tokenizer: "Tokenizer") -> str:
    return tokenizer.decode([token_id], skip_special_tokens=False)


def _offsets(request: Request, tokenizer: "Tokenizer") -> Sequence[int]:
    """Return where in the output's text each token begins."""
    text = OutputText(tokenizer, replace(request.params, stop=()))
    offsets, length = [], 0
    for token_id in request.output_token_ids:
        offsets.append(length)
        text.append(token_id)
        length += len(text.take())
    return offsets
