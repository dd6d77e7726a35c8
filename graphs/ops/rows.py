"""Arithmetic whose result for a row does not depend on the other rows.

A request's logits must be the same bits alone, in any batch, in any row, at any padding and with
any number of threads. Library kernels pick their summation order by shape, place and threads, and
their vector bodies and scalar tails differ in the last bit, so op bodies use these rules instead:

* products, sums and transcendental functions are evaluated in float64 and rounded once to float32.
  Orders of summation differ there by some ulps of float64, which the rounding removes;
* matrix products run over tiles of a fixed number of rows (`matmul_rows`), or with the token as
  batch dimension, so that every product a row takes part in has one shape.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

ROW_TILE = 8  # rows of one product; a decode step of one request computes seven idle rows
TOKEN_BLOCK = (
    64  # tokens handled at once by bodies that gather keys per token: bounds their scratch
)


def matmul_rows(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """Return `x @ weight^T` in float32, each row independent of the number and place of the others.

    Args:
        x_TK: [num_rows, K], float32.
        weight_NK: [N, K], float32.
    Returns:
        [num_rows, N], float32.
    """
    num_rows = x_TK.shape[0]
    padded = functional.pad(x_TK, (0, 0, 0, -num_rows % ROW_TILE))
    tiles = padded.reshape(-1, ROW_TILE, x_TK.shape[1])
    # Converted before it is expanded: all tiles share one float64 weight.
    weights = weight_NK.double().t().unsqueeze(0).expand(tiles.shape[0], -1, -1)
    product = torch.bmm(tiles.double(), weights)
    return product.reshape(-1, weight_NK.shape[0])[:num_rows].float()


def multiply_exact(a_BMK: Tensor, b_BKN: Tensor) -> Tensor:
    """Batched matrix product in float64, rounded once to float32."""
    return torch.bmm(a_BMK.double(), b_BKN.double()).float()


def sum_exact(x: Tensor, dim: int) -> Tensor:
    """Sum over one dim in float64, rounded once to float32."""
    return x.double().sum(dim).float()


def token_blocks(num_tokens: int) -> Iterator[slice]:
    """Yield slices of at most TOKEN_BLOCK tokens."""
    for begin in range(0, num_tokens, TOKEN_BLOCK):
        yield slice(begin, min(begin + TOKEN_BLOCK, num_tokens))


def top_indices(scores_TN: Tensor, k: int) -> Tensor:
    """Return the columns of the k largest scores of each row, ascending, -1 where a score is -inf.

    Ties go to the lower column. Scores are float32 without NaN; the result is int32 [num_rows, k].
    """
    num_columns = scores_TN.shape[1]
    # Order-preserving integers: a total order without ties, so that any top-k algorithm finds the
    # same set.
    bits = (scores_TN + 0.0).view(torch.int32).long()  # + 0.0 turns -0 into +0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    column = torch.arange(num_columns, device=scores_TN.device)
    picked = torch.topk((ordered << 30) | (num_columns - 1 - column), min(k, num_columns)).indices
    is_real = scores_TN.gather(1, picked) > -torch.inf
    ascending = torch.where(is_real, picked, num_columns).sort(-1).values
    result = torch.where(ascending == num_columns, -1, ascending).int()
    return functional.pad(result, (0, k - result.shape[1]), value=-1)


def look_back(
    step: Tensor,
    ring: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    chunk_starts_T: Tensor,
    count: int,
    rows: slice,
) -> tuple[Tensor, Tensor]:
    """Gather, for each token, the values of its own and the `count - 1` positions before it.

    Positions that this step computes come from `step`, earlier ones from the request's ring.

    Args:
        step: values of this step's tokens, [num_tokens, ...].
        ring: values of earlier positions, [num_slots, ring_size, ...]; position p lies at p mod
            ring_size.
        positions_T, slots_T, chunk_starts_T: int32 [num_tokens].
        count: positions per token.
        rows: the tokens to gather for.
    Returns:
        values [rows, count, ...] in ascending position, zero before position 0; valid [rows, count]
        bool.
    """
    num_tokens = positions_T.shape[0]
    token = torch.arange(num_tokens, device=step.device)[rows, None]
    back = torch.arange(count - 1, -1, -1, device=step.device)
    wanted = positions_T[rows, None].long() - back
    in_step = wanted >= chunk_starts_T[rows, None]
    from_step = step[torch.where(in_step, token - back, 0)]
    from_ring = ring[slots_T[rows, None].long(), wanted % ring.shape[1]]
    trailing = (1,) * (step.dim() - 1)
    values = torch.where(in_step.view(*in_step.shape, *trailing), from_step, from_ring)
    valid = wanted >= 0
    # A stale entry of another request may be anything, NaN too: replace, do not multiply.
    nothing = torch.zeros((), dtype=values.dtype, device=values.device)
    return torch.where(valid.view(*valid.shape, *trailing), values, nothing), valid
