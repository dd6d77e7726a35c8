"""Static step inputs: one packed int32 block per bucket, with a typed view for every field.

The runtime writes host arrays into the views; replays read them at fixed addresses. On a device the
block is what
is copied, once a step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from graphs.bucket import BucketKey, Variant
from graphs.ops.logits import MAX_BIAS
from graphs.tracing import TensorSpec

_WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class StepField:
    """One static input.

    Args:
        name: name of the view.
        dtype: of the view.
        per_token: it has a value per token row, else per logit row.
        columns: 0 for one value a row, else the width of a row's values; MASK_COLUMNS for one bit
            per token of the vocabulary.
    """

    name: str
    dtype: torch.dtype
    per_token: bool
    columns: int = 0


MASK_COLUMNS = -1

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
    StepField("min_p", torch.float32, False),
)
CONSTRAINT_FIELDS = (
    StepField("token_mask", torch.int32, False, MASK_COLUMNS),
    StepField("bias_ids", torch.int32, False, MAX_BIAS),
    StepField("bias_values", torch.float32, False, MAX_BIAS),
    StepField("sample_slots", torch.int32, False),
    StepField("prompt_lengths", torch.int32, False),
    StepField("lengths", torch.int32, False),
    StepField("repetition_penalty", torch.float32, False),
    StepField("presence_penalty", torch.float32, False),
    StepField("frequency_penalty", torch.float32, False),
)
SCORE_FIELDS = (StepField("targets", torch.int32, True),)

_FIELDS = {
    Variant.SAMPLE: SAMPLE_FIELDS,
    Variant.SCORE: SCORE_FIELDS,
    Variant.TAPS: SCORE_FIELDS,
    Variant.SAMPLE_ALL: SAMPLE_FIELDS + CONSTRAINT_FIELDS,
    Variant.SAMPLE_PROMPT: SAMPLE_FIELDS + CONSTRAINT_FIELDS + SCORE_FIELDS,
}
# What a padded row holds where it is not zero: nothing is forbidden, biased or penalised.
_NEUTRAL = {"top_p": 1, "top_k": -1, "token_mask": -1, "bias_ids": -1, "repetition_penalty": 1}

STEP_INPUTS = frozenset(
    f.name for f in TOKEN_FIELDS + SAMPLE_FIELDS + CONSTRAINT_FIELDS + SCORE_FIELDS
)


def step_specs(bucket: BucketKey, vocab_size: int) -> dict[str, TensorSpec]:
    """Return name -> spec of the static inputs of a bucket, in the order of the block."""
    specs = {}
    for field in _FIELDS[bucket.variant] + TOKEN_FIELDS:
        rows = bucket.rows if field.per_token else bucket.logit_rows
        columns = -(-vocab_size // 32) if field.columns == MASK_COLUMNS else field.columns
        specs[field.name] = TensorSpec((rows, columns) if columns else (rows,), field.dtype)
    return specs


class StaticInputs:
    """The packed block of one bucket and its typed views.

    Args:
        bucket: the padded shape.
        vocab_size: tokens of the model.
    """

    def __init__(self, bucket: BucketKey, vocab_size: int) -> None:
        self.bucket = bucket
        specs = step_specs(bucket, vocab_size)
        num_words = sum(spec.num_bytes for spec in specs.values()) // _WORD_BYTES
        self.block = torch.zeros(num_words, dtype=torch.int32)
        self.views: dict[str, Tensor] = {}
        begin = 0
        for name, spec in specs.items():
            end = begin + spec.num_bytes // _WORD_BYTES
            self.views[name] = self.block[begin:end].view(spec.dtype).view(spec.shape)
            begin = end

    def clear(self) -> None:
        """Make every row a padded row: token 0, position 0, slot 0, greedy, unconstrained."""
        self.block.zero_()
        for name, value in _NEUTRAL.items():
            if name in self.views:
                self.views[name].fill_(value)
