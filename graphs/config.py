"""CompileConfig: every option that changes generated code."""

from dataclasses import dataclass
from typing import Literal

import torch

NumericsName = Literal["official", "reference"]
KindName = Literal["reference", "inductor"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileConfig:
    """What the traced and compiled units depend on besides the model and the bucket.

    Args:
        numerics: "official" = bfloat16 streams (contract A), "reference" = float32.
        cache_quant: apply the three fake quantisers of caches and indexer operands, and store
            packed records.
        act_quant: quantise the input of FP8 and FP4 linears to FP8.
        kind: how a unit is executed.
        disabled_passes: names of passes that do not run.
    """

    numerics: NumericsName = "official"
    cache_quant: bool = True
    act_quant: bool = True
    kind: KindName = "reference"
    disabled_passes: tuple[str, ...] = ()

    @property
    def act_dtype(self) -> torch.dtype:
        """Dtype of streams and activations."""
        return torch.bfloat16 if self.numerics == "official" else torch.float32
