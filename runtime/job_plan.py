"""What a job will take: its tokens, their spread and the steps, from the tokenizer alone.

Every output is counted at its longest. Requests that only the pool of key/value blocks refuses are
not found here, and preemptions are not foreseen.
"""

import heapq
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from backends.capability import probe_cpu
from graphs.errors import EngineError
from model.config import ModelConfig
from model.tokenizer import Tokenizer
from runtime.chat import ChatFormat
from runtime.config import EngineConfig, ModelFacts, resolve
from runtime.jobs import Job, LineError
from runtime.request import check_params, check_prompt

_FIRST_BIN = 16  # tokens
_BAR_WIDTH = 40  # characters


@dataclass(slots=True)
class JobPlan:
    """The size of a job.

    Attributes:
        max_num_seqs: requests that run at the same time.
        max_num_batched_tokens: tokens of a step.
        num_lines: lines that are not blank.
        num_failed: those of them that cannot run.
        num_requests: outputs, each with its prompt.
        prompt_tokens: of all requests.
        longest_prompt: tokens.
        output_tokens: of all requests, at most.
        histogram: lines by the power of two that their prompt's length does not exceed.
        num_steps: an estimate.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    num_lines: int = 0
    num_failed: int = 0
    num_requests: int = 0
    prompt_tokens: int = 0
    longest_prompt: int = 0
    output_tokens: int = 0
    histogram: Counter[int] = field(default_factory=Counter)
    num_steps: int = 0

    def add(self, num_prompt: int, num_outputs: int, num_requests: int) -> None:
        """Add a line of so many requests, each with so many tokens."""
        self.num_requests += num_requests
        self.prompt_tokens += num_requests * num_prompt
        self.longest_prompt = max(self.longest_prompt, num_prompt)
        self.output_tokens += num_requests * num_outputs
        self.histogram[max(_FIRST_BIN, 1 << (num_prompt - 1).bit_length())] += 1

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values; keys of the histogram are the longest length counted."""
        return {
            "lines": self.num_lines,
            "failed": self.num_failed,
            "requests": self.num_requests,
            "prompt_tokens": self.prompt_tokens,
            "longest_prompt_tokens": self.longest_prompt,
            "max_output_tokens": self.output_tokens,
            "estimated_steps": self.num_steps,
            "prompt_length_histogram": {
                str(edge): count for edge, count in sorted(self.histogram.items())
            },
        }

    def lines(self) -> list[str]:
        """Return the plan as text."""
        limits = f"{self.max_num_seqs} requests and {self.max_num_batched_tokens} tokens at most"
        lines = [
            f"lines          {self.num_lines}, {self.num_failed} of them fail",
            f"requests       {self.num_requests}",
            f"prompt tokens  {self.prompt_tokens}, the longest prompt has {self.longest_prompt}",
            f"output tokens  {self.output_tokens} at most",
            f"steps          about {self.num_steps}, each of {limits}",
        ]
        most = max(self.histogram.values(), default=1)
        if self.histogram:
            lines.append("lines by prompt tokens")
        for edge, count in sorted(self.histogram.items()):
            low = 1 if edge == _FIRST_BIN else edge // 2 + 1
            bar = "#" * -(-count * _BAR_WIDTH // most)
            lines.append(f"  {low:>7} to {edge:<7} {count:>8} {bar}")
        return lines


def plan_job(
    items: Iterable[Job | LineError], tokenizer: Tokenizer, model: ModelConfig, config: EngineConfig
) -> JobPlan:
    """Encode the prompts of a job and add up what it takes.

    Args:
        items: the lines.
        tokenizer: of the checkpoint.
        model: its configuration.
        config: limits that are None are chosen as if memory were no matter.
    Raises:
        FieldRangeError: max_model_len exceeds the model.
        InputUnreadable: reading broke off.
    """
    limits = _limits(config, model)
    assert limits.max_num_seqs and limits.max_num_batched_tokens and limits.max_model_len
    plan = JobPlan(limits.max_num_seqs, limits.max_num_batched_tokens)
    encoder = _Encoder(tokenizer, model, limits.max_model_len)
    steps = _Steps(plan)
    for item in items:
        plan.num_lines += 1
        try:
            length = 0 if isinstance(item, LineError) else len(encoder.encode(item))
        except EngineError:
            length = 0
        if isinstance(item, LineError) or not length:
            plan.num_failed += 1
            continue
        num_outputs = min(item.params.max_tokens, limits.max_model_len - length)
        plan.add(length, num_outputs, item.params.n)
        for _ in range(item.params.n):
            steps.add(length, num_outputs)
    plan.num_steps = steps.total()
    return plan


def _limits(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    facts = ModelFacts(
        max_position_embeddings=model.text_config.max_position_embeddings,
        device=probe_cpu().backend,
        bytes_per_block=0,
        bytes_per_slot=0,
        free_memory_bytes=sys.maxsize,
    )
    return resolve(config, facts)[0]


class _Encoder:
    """Encodes and checks jobs as the engine would."""

    def __init__(self, tokenizer: Tokenizer, model: ModelConfig, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._eos_token_id = model.eos_token_id
        self._vocab_size = model.text_config.vocab_size
        self._max_model_len = max_model_len
        self._chat_format: ChatFormat | None = None

    def encode(self, job: Job) -> list[int]:
        if job.chat is not None:
            if self._chat_format is None:
                self._chat_format = ChatFormat(self._tokenizer, self._eos_token_id)
            ids = self._chat_format.encode(job.chat, job.job_id)
        elif job.prompt is not None:
            ids = self._tokenizer.encode(job.prompt)
        else:
            ids = job.prompt_token_ids or []
        if job.params.truncate_prompt_tokens is not None:
            ids = ids[-job.params.truncate_prompt_tokens :]
        check_prompt(job.job_id, ids, self._vocab_size, self._max_model_len)
        check_params(job.job_id, job.params, self._vocab_size)
        return ids


class _Steps:
    """Estimates steps: requests take free places in order, and no step has more than its tokens."""

    def __init__(self, plan: JobPlan) -> None:
        self._max_tokens = plan.max_num_batched_tokens
        self._free_at = [0] * plan.max_num_seqs  # a heap: the step in which each place is free
        self._num_tokens = 0
        self._last = 0

    def add(self, num_prompt: int, num_outputs: int) -> None:
        self._num_tokens += num_prompt + num_outputs - 1  # the last token is never computed
        num_chunks = -(-num_prompt // self._max_tokens)
        end = self._free_at[0] + num_chunks + num_outputs - 1
        heapq.heapreplace(self._free_at, end)
        self._last = max(self._last, end)

    def total(self) -> int:
        return max(self._last, -(-self._num_tokens // self._max_tokens))
