"""Exchange of tokens between expert-parallel ranks; on one rank every op here is a copy or a local
sum.

Letters: T tokens, k experts per token, H hidden.
"""

import torch
from torch import Tensor

from graphs.op import EXACT, FP32_CLOSE, op
from graphs.ops.rows import sum_exact


def _sample_dispatch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, 4, (5, 2), generator=generator, dtype=torch.int32)
    return torch.randn(5, 32, generator=generator), ids, torch.rand(5, 2, generator=generator)


@op(
    shape=lambda x, ids, weights: (
        torch.empty_like(x),
        torch.empty_like(ids),
        torch.empty_like(weights),
    ),
    samples=_sample_dispatch,
    tolerance=EXACT,
)
def dispatch_experts(
    x_TH: Tensor, ids_Tk: Tensor, weights_Tk: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Send each token's row to the ranks of its experts.

    Args:
        x_TH: [num_tokens, H].
        ids_Tk: int32 [num_tokens, k], -1 = none.
        weights_Tk: float32 [num_tokens, k].
    Returns:
        The rows this rank computes with their ids and weights; on one rank a copy of the arguments.
    """
    return x_TH.clone(), ids_Tk.clone(), weights_Tk.clone()


def _sample_combine(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(5, 32, generator=generator)
    return torch.randn(5, 3, 32, generator=generator), shared


@op(
    shape=lambda outputs, shared: torch.empty_like(shared),
    samples=_sample_combine,
    tolerance=FP32_CLOSE,
)
def combine_experts(outputs_TkH: Tensor, shared_TH: Tensor) -> Tensor:
    """Gather each token's expert outputs back and add them to the shared expert's.

    Args:
        outputs_TkH: [num_tokens, k, H], weighted already, zero where there is no expert.
        shared_TH: output of the shared expert, [num_tokens, H].
    Returns:
        [num_tokens, H], dtype of the shared output.
    Numerics: routed outputs are summed in float32, then the shared one is added, one rounding.
    Source: model.md 4.2, 10.2.
    """
    return (sum_exact(outputs_TkH, 1) + shared_TH.float()).to(shared_TH.dtype)
