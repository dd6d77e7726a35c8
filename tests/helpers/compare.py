"""Comparison of a float32 or bfloat16 result with its float64 definition."""

import torch
from torch import Tensor


def assert_rounded(actual: Tensor, expected: Tensor, error: Tensor | float) -> None:
    """Check that `actual` is `expected` plus at most `error`, rounded once to the dtype of
    `actual`.

    Much sharper than a tolerance of an ulp: a second rounding on the way shows.

    Args:
        actual: result of an op, bfloat16 or float32.
        expected: float64, same shape.
        error: absolute error allowed before the final rounding, float64 or a number.
    """
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert expected.dtype == torch.float64
    low = (expected - error).to(actual.dtype).double()
    high = (expected + error).to(actual.dtype).double()
    value = actual.double()
    wrong = ~((low <= value) & (value <= high))
    first = tuple(wrong.nonzero()[0].tolist()) if wrong.any() else ()
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} values are off; first at {first}: "
        f"{value[first].item()!r}, expected {low[first].item()!r} to {high[first].item()!r}"
    )
