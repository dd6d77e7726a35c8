"""Buckets: the padded step shapes that graphs are made for, and how a step finds its bucket."""

import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from graphs.errors import BucketTooSmall

Phase = Literal["decode", "prefill"]


class Variant(IntEnum):
    """What changes the topology of a step besides its shape."""

    SAMPLE = 0  # logits of the rows to sample, sampled by temperature, top_p, top_k and min_p
    SCORE = 1  # logits and target log-probabilities of every row
    TAPS = 2  # SCORE, plus intermediate values of every layer
    SAMPLE_ALL = 3  # SAMPLE, with masks, biases, penalties and log-probabilities
    SAMPLE_PROMPT = 4  # SAMPLE_ALL, plus log-probabilities of every row's next prompt token

    @property
    def is_sampled(self) -> bool:
        """Whether the step samples tokens."""
        return self in (Variant.SAMPLE, Variant.SAMPLE_ALL, Variant.SAMPLE_PROMPT)


@dataclass(frozen=True, order=True, slots=True)
class BucketKey:
    """One padded step shape; nothing else may select a graph.

    Args:
        phase: "decode" = one token per request, "prefill" = chunks of any length (decode tokens
            ride along).
        rows: padded token rows.
        q_per_row: tokens per request; 1 in decode, 0 = ragged in prefill.
        ctx_tier: reserved for kernels whose launch depends on the context bound; 0.
        variant: see Variant.
        logit_rows: padded rows whose logits are computed; every row unless the variant samples.
    """

    phase: Phase
    rows: int
    q_per_row: int
    ctx_tier: int
    variant: Variant
    logit_rows: int

    def __str__(self) -> str:
        return (
            f"{self.phase}/r{self.rows}/q{self.q_per_row}/c{self.ctx_tier}/v{int(self.variant)}"
            f"/l{self.logit_rows}"
        )


def powers_up_to(largest: int, first: int = 1, factor: int = 2) -> tuple[int, ...]:
    """Return first, first * factor, ... below `largest`, then `largest` itself, exactly."""
    sizes = []
    while first < largest:
        sizes.append(first)
        first *= factor
    return (*sizes, largest)


@dataclass(frozen=True, slots=True)
class BucketPolicy:
    """The bucket sizes of one engine.

    Args:
        decode_sizes: ascending row counts of decode buckets; the last one is max_num_seqs.
        prefill_sizes: ascending token counts of prefill buckets; the last is
            max_num_batched_tokens.
    """

    decode_sizes: tuple[int, ...]
    prefill_sizes: tuple[int, ...]

    @classmethod
    def preset(cls, max_num_seqs: int, max_num_batched_tokens: int) -> "BucketPolicy":
        """Return few, coarse buckets: at most about four of each kind at small limits."""
        return cls(
            powers_up_to(max_num_seqs, 1, 4),
            powers_up_to(max_num_batched_tokens, min(16, max_num_batched_tokens), 4),
        )

    def select(
        self, num_tokens: int, num_sampled: int, is_decode: bool, variant: Variant
    ) -> BucketKey:
        """Return the smallest bucket that holds a step.

        Args:
            num_tokens: token rows.
            num_sampled: rows whose logits are wanted.
            is_decode: every request has one token, all sampled.
            variant: see Variant.
        Raises:
            BucketTooSmall: the scheduler made a step beyond its own limits.
        """
        if is_decode and variant in (Variant.SAMPLE, Variant.SAMPLE_ALL):
            rows = _round_up(self.decode_sizes, num_tokens)
            return BucketKey("decode", rows, 1, 0, variant, rows)
        rows = _round_up(self.prefill_sizes, num_tokens)
        wanted = max(1, num_sampled)
        logit_rows = _round_up(self.decode_sizes, wanted) if variant.is_sampled else rows
        return BucketKey("prefill", rows, 0, 0, variant, logit_rows)


def _round_up(sizes: Iterable[int], needed: int) -> int:
    ordered = list(sizes)
    index = bisect.bisect_left(ordered, needed)
    if index == len(ordered):
        text = ", ".join(map(str, ordered))
        raise BucketTooSmall(needed=needed, largest=ordered[-1], sizes=text)
    return ordered[index]
