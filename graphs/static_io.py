"""Static step inputs: one packed int32 block per bucket, with a typed view for every field.

The runtime writes host arrays into the views; replays read them at fixed addresses. On a device the
block is what
is copied, once a step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from graphs.bucket import BucketKey, Variant
from graphs.tracing import TensorSpec

_WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class StepField:
    """One static input: its dtype, and whether it has a value per token row or per logit row."""

    name: str
    dtype: torch.dtype
    per_token: bool


TOKEN_FIELDS = tuple(
    StepField(name, torch.int32, True)
    for name in ("token_ids", "positions", "slots", "chunk_starts", "chunk_ends")
)
SAMPLE_FIELDS = (
    StepField("seeds", torch.int64, False),  # 8-byte fields first: they stay aligned
    StepField("sample_positions", torch.int64, False),
    StepField("logit_rows", torch.int32, False),
    StepField("temperature", torch.float32, False),
    StepField("top_p", torch.float32, False),
    StepField("top_k", torch.int32, False),
)
SCORE_FIELDS = (StepField("targets", torch.int32, True),)


def step_fields(bucket: BucketKey) -> tuple[StepField, ...]:
    """Return the static inputs of a bucket."""
    extra = SAMPLE_FIELDS if bucket.variant is Variant.SAMPLE else SCORE_FIELDS
    return extra + TOKEN_FIELDS


def step_specs(bucket: BucketKey) -> dict[str, TensorSpec]:
    """Return name -> spec of the static inputs of a bucket."""
    return {
        f.name: TensorSpec((bucket.rows if f.per_token else bucket.logit_rows,), f.dtype)
        for f in step_fields(bucket)
    }


class StaticInputs:
    """The packed block of one bucket and its typed views."""

    def __init__(self, bucket: BucketKey) -> None:
        self.bucket = bucket
        specs = step_specs(bucket)
        self.block = torch.zeros(
            sum(s.num_bytes for s in specs.values()) // _WORD_BYTES, dtype=torch.int32
        )
        self.views: dict[str, Tensor] = {}
        begin = 0
        for name, spec in specs.items():
            end = begin + spec.num_bytes // _WORD_BYTES
            self.views[name] = self.block[begin:end].view(spec.dtype)
            begin = end

    def clear(self) -> None:
        """Make every row a padded row: token 0, position 0, slot 0, greedy."""
        self.block.zero_()
        if self.bucket.variant is Variant.SAMPLE:
            self.views["top_p"].fill_(1.0)
            self.views["top_k"].fill_(-1)
