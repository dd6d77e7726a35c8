"""Manifold-constrained hyper-connections: four residual streams mixed by a doubly stochastic
matrix.

Letters: T tokens, C streams, D hidden, M = C * (C + 2) mixes.
"""

import torch
from torch import Tensor

from graphs.op import Tolerance, op
from graphs.ops.rows import matmul_rows, sum_exact

_STREAM_TOLERANCE = Tolerance(2e-2, 1e-2)


def sinkhorn(logits_TCC: Tensor, iters: int, eps: float) -> Tensor:
    """Make float32 matrices [..., C, C] doubly stochastic.

    A softmax over the last dim, then `iters` column and `iters - 1` row normalisations, in float64
    and rounded once.
    """
    comb = torch.softmax(logits_TCC.double(), -1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb.float()


def _sample_mixes(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, int, float, float]:
    generator = torch.Generator().manual_seed(seed)
    streams = torch.randn(9, 4, 32, generator=generator)
    fn = torch.randn(24, 128, generator=generator) * 0.1
    scale, base = torch.rand(3, generator=generator), torch.randn(24, generator=generator)
    return streams, fn, scale, base, 20, 1e-6, 1e-20


def _mixes_shape(streams: Tensor, *_rest: object) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens, num_streams = streams.shape[:2]
    row = streams.new_empty((num_tokens, num_streams), dtype=torch.float32)
    return row, torch.empty_like(row), row.new_empty((num_tokens, num_streams, num_streams))


@op(shape=_mixes_shape, samples=_sample_mixes, tolerance=Tolerance(2e-6, 1e-5))
def hc_mixes(
    streams_TCD: Tensor,
    fn_MX: Tensor,
    scale_3: Tensor,
    base_M: Tensor,
    sinkhorn_iters: int,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the mixes of one sublayer from the residual streams.

    Args:
        streams_TCD: [num_tokens, C, D], bfloat16 or float32.
        fn_MX: projection, float32 [C * (C + 2), C * D].
        scale_3, base_M: float32 [3] and [C * (C + 2)].
        sinkhorn_iters: column normalisations.
        eps: hc_eps.
        norm_eps: eps of the one statistic per token.
    Returns:
        pre [num_tokens, C], post [num_tokens, C], comb [num_tokens, C (old stream), C (new
        stream)], float32.
    Numerics: float32 throughout.
    Source: model.md 2.3.
    """
    flat = streams_TCD.float().flatten(1)
    num_streams = streams_TCD.shape[1]
    statistic = torch.rsqrt(sum_exact(flat * flat, -1) / flat.shape[-1] + norm_eps)
    mixes = matmul_rows(flat, fn_MX) * statistic.unsqueeze(-1)
    pre, post, comb = mixes.split((num_streams, num_streams, num_streams**2), -1)
    base_pre, base_post, base_comb = base_M.split((num_streams, num_streams, num_streams**2))
    pre = torch.sigmoid((pre * scale_3[0] + base_pre).double()).float() + eps
    post = 2 * torch.sigmoid((post * scale_3[1] + base_post).double()).float()
    logits = (comb * scale_3[2] + base_comb).unflatten(-1, (num_streams, num_streams))
    return pre, post, sinkhorn(logits, sinkhorn_iters, eps)


def _sample_pre(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(9, 4, 32, generator=generator), torch.rand(9, 4, generator=generator)


@op(
    shape=lambda streams, pre: streams.new_empty((streams.shape[0], streams.shape[2])),
    samples=_sample_pre,
    tolerance=_STREAM_TOLERANCE,
)
def hc_pre(streams_TCD: Tensor, pre_TC: Tensor) -> Tensor:
    """Fold the streams into one sublayer input: sum over c of pre[c] * streams[c].

    Args:
        streams_TCD: [num_tokens, C, D], bfloat16 or float32.
        pre_TC: float32 [num_tokens, C], made by the sublayer before.
    Returns:
        [num_tokens, D], dtype of the streams; float32 inside, streams added in order.
    Source: model.md 2.2.
    """
    folded = pre_TC[:, :1] * streams_TCD[:, 0].float()
    for c in range(1, streams_TCD.shape[1]):
        folded = folded + pre_TC[:, c : c + 1] * streams_TCD[:, c].float()
    return folded.to(streams_TCD.dtype)


def _sample_post(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    comb = torch.rand(9, 4, 4, generator=generator)
    out = torch.randn(9, 32, generator=generator)
    return (
        out,
        torch.randn(9, 4, 32, generator=generator),
        torch.rand(9, 4, generator=generator),
        comb,
    )


@op(
    shape=lambda out, streams, post, comb: torch.empty_like(streams),
    samples=_sample_post,
    tolerance=_STREAM_TOLERANCE,
)
def hc_post(out_TD: Tensor, streams_TCD: Tensor, post_TC: Tensor, comb_TCC: Tensor) -> Tensor:
    """Write a sublayer's output back: new[k] = post[k] * out + sum over j of comb[j][k] *
    streams[j].

    Args:
        out_TD: sublayer output, [num_tokens, D].
        streams_TCD: [num_tokens, C, D], bfloat16 or float32.
        post_TC: float32 [num_tokens, C].
        comb_TCC: float32 [num_tokens, C (source), C (target)].
    Returns:
        [num_tokens, C, D], dtype of the streams; one rounding.
    Source: model.md 2.4.
    """
    old = streams_TCD.float()
    new = post_TC.unsqueeze(-1) * out_TD.float().unsqueeze(1)
    for j in range(old.shape[1]):
        new = new + comb_TCC[:, j].unsqueeze(-1) * old[:, j : j + 1]
    return new.to(streams_TCD.dtype)
