"""Responses to the requests of OpenAI's batch files.

Ids are digests of the request and `created` is 0: a response depends on request, model and
configuration alone.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from runtime.logprob_records import completion_logprobs, prompt_logprob_records
from runtime.request import Request

if TYPE_CHECKING:
    from model.tokenizer import Tokenizer
    from runtime.chat import Chat, ChatFormat
    from runtime.openai_batch import BatchHead
    from runtime.reply import Reply

CREATED = 0  # seconds since 1970 at OpenAI; a clock has no place in a result


def error_line(head: "BatchHead", code: str, message: str, number: int) -> dict[str, Any]:
    """Return the output line of a request that could not be run."""
    return {
        "id": f"batch_req_{head.digest}",
        "custom_id": head.custom_id,
        "response": None,
        "error": {"code": code, "message": message, "param": None, "line": number},
    }


def response_line(
    head: "BatchHead",
    chat: "Chat | None",
    requests: Sequence[Request],
    tokenizer: "Tokenizer",
    chat_format: "ChatFormat | None",
) -> dict[str, Any]:
    """Return the output line of a request that has finished.

    Args:
        head: of the line.
        chat: its conversation, if it has one.
        requests: its outputs in order, all finished.
        tokenizer: of the checkpoint.
        chat_format: reads the replies of a chat.
    Raises:
        ReplyUnreadable: an output is no chat reply.
    """
    if chat is None:
        kind, name, num_thought = "text_completion", "cmpl", None
        choices = [_completion_choice(request, tokenizer) for request in requests]
    else:
        assert chat_format is not None, "it encoded the conversation"
        kind, name = "chat.completion", "chatcmpl"
        prefix = f"call_{head.digest}"
        replies = [chat_format.reply(chat, r, f"{prefix}_{r.sample_index}") for r in requests]
        choices = [_chat_choice(index, reply) for index, reply in enumerate(replies)]
        num_thought = sum(reply.num_reasoning_tokens for reply in replies)
    body = {
        "id": f"{name}-{head.digest}",
        "object": kind,
        "created": CREATED,
        "model": head.model,
        "choices": choices,
        "usage": _usage(requests, num_thought),
        "system_fingerprint": None,
    }
    if requests[0].prompt_logprobs is not None:
        body["prompt_logprobs"] = prompt_logprob_records(requests[0], tokenizer)
    response = {"status_code": 200, "request_id": f"req_{head.digest}", "body": body}
    return {
        "id": f"batch_req_{head.digest}",
        "custom_id": head.custom_id,
        "response": response,
        "error": None,
    }


def _chat_choice(index: int, reply: "Reply") -> dict[str, Any]:
    return {
        "index": index,
        "message": {**reply.message(), "refusal": None},
        "logprobs": reply.logprobs,
        "finish_reason": reply.finish_reason,
    }


def _completion_choice(request: Request, tokenizer: "Tokenizer") -> dict[str, Any]:
    return {
        "index": request.sample_index,
        "text": request.text.text if request.text is not None else "",
        "logprobs": completion_logprobs(request, tokenizer),
        "finish_reason": request.finish_reason,
    }


def _usage(requests: Sequence[Request], num_thought: int | None) -> dict[str, Any]:
    num_prompt = len(requests[0].prompt_token_ids)
    num_output = sum(len(request.output_token_ids) for request in requests)
    usage: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
    }
    if num_thought is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": num_thought}
    return usage
