"""Inverse frequencies of the rotary embedding, plain and YaRN-scaled (model.md 3.2)."""

import math

import torch
from torch import Tensor

from model.config import RopeScaling, TextConfig


def inverse_frequencies(theta: float, num_channels: int, scaling: RopeScaling | None) -> Tensor:
    """Return float32 [num_channels / 2] inverse frequencies.

    Args:
        theta: base.
        num_channels: qk_rope_head_dim.
        scaling: YaRN parameters, or None.
    """
    exponents = torch.arange(0, num_channels, 2, dtype=torch.float32) / num_channels
    frequencies = 1.0 / theta**exponents
    if scaling is None:
        return frequencies

    def correction(rotations: float) -> float:
        length = scaling.original_max_position_embeddings
        return num_channels * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(correction(scaling.beta_fast)), 0)
    high = min(math.ceil(correction(scaling.beta_slow)), num_channels - 1)
    pair = torch.arange(num_channels // 2, dtype=torch.float32)
    ramp = ((pair - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequencies / scaling.factor * ramp + frequencies * (1 - ramp)


def rope_constants(config: TextConfig) -> dict[str, Tensor]:
    """Return the inverse frequencies by rope name: "window" (ratio 0 layers) and "compress" (all
    others)."""
    channels = config.qk_rope_head_dim
    return {
        "window": inverse_frequencies(config.rope_theta, channels, None),
        "compress": inverse_frequencies(config.compress_rope_theta, channels, config.rope_scaling),
    }
