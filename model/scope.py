"""Scope: the named tensors one family function sees.

A family function asks for weights, caches, step inputs and activations by local names. That one
interface lets
the same code run under the tracer (which first records what a function asks for) and in tests.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from graphs.config import CompileConfig
from graphs.ops import linear, rms_norm
from model.config import TextConfig


class Scope:
    """Named tensors of one unit, with the two primitives every module uses.

    Args:
        tensors: local name -> tensor.
        config: dimensions of the model.
        compile_config: numerics of the graph being traced.
        taps: where `tap` puts intermediate values; None = taps are off.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        config: TextConfig,
        compile_config: CompileConfig,
        taps: dict[str, Tensor] | None = None,
    ) -> None:
        self._tensors = tensors
        self.config = config
        self.compile_config = compile_config
        self.taps = taps

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    @property
    def act_dtype(self) -> torch.dtype:
        """Dtype of streams and activations."""
        return self.compile_config.act_dtype

    def weight(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Return `name.weight` and its scale, which plain tensors do not have."""
        scale = f"{name}.scale"
        return self[f"{name}.weight"], self[scale] if scale in self._tensors else None

    def linear(self, name: str, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Apply the linear layer `name`; the result has the activation dtype unless told
        otherwise."""
        dtype = out_dtype or self.act_dtype
        return linear(x, *self.weight(name), self.compile_config.act_quant, dtype)

    def norm(self, name: str, x: Tensor) -> Tensor:
        """Apply the RMS norm `name`."""
        return rms_norm(x, self[f"{name}.weight"], self.config.rms_norm_eps)

    def tap(self, name: str, value: Tensor) -> None:
        """Publish an intermediate value when taps are on."""
        if self.taps is not None:
            self.taps[name] = value
