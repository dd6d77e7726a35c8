"""Token embedding and the small row gathers at both ends of the model."""

import torch
from torch import Tensor

from graphs.op import EXACT, op


def _sample_embed(seed: int) -> tuple[Tensor, Tensor, int, torch.dtype]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 50, (9,), generator=generator, dtype=torch.int32)
    return (
        ids,
        torch.randn(50, 32, generator=generator),
        4,
        (torch.float32, torch.bfloat16)[seed % 2],
    )


@op(
    shape=lambda token_ids, weight, num_streams, out_dtype: (
        weight.new_empty((token_ids.shape[0], num_streams, weight.shape[1]), dtype=out_dtype),
        weight.new_empty((token_ids.shape[0], num_streams), dtype=torch.float32),
    ),
    samples=_sample_embed,
    tolerance=EXACT,
)
def embed_streams(
    token_ids_T: Tensor, weight_VD: Tensor, num_streams: int, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Look up embeddings, copy them into every residual stream, and make the first sublayer's mix.

    Args:
        token_ids_T: int32 [num_tokens], in [0, vocab).
        weight_VD: [vocab, D], bfloat16 or float32.
        num_streams: hc_mult.
        out_dtype: dtype of the streams.
    Returns:
        streams [num_tokens, num_streams, D]; pre float32 [num_tokens, num_streams], one for stream
        0 only.
    Source: model.md 2.2.
    """
    rows = weight_VD[token_ids_T.long()].to(out_dtype)
    pre = torch.zeros(rows.shape[0], num_streams, device=rows.device)
    pre[:, 0] = 1.0
    return rows.unsqueeze(1).repeat(1, num_streams, 1), pre


def _sample_select(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(9, 4, 8, generator=generator)
    return x, torch.randint(0, 9, (5,), generator=generator, dtype=torch.int32)


@op(
    shape=lambda x, rows: x.new_empty((rows.shape[0], *x.shape[1:])),
    samples=_sample_select,
    tolerance=EXACT,
)
def select_rows(x: Tensor, rows_B: Tensor) -> Tensor:
    """Gather rows: x[rows]. rows_B: int32 [num_rows], each in [0, x.shape[0])."""
    return x[rows_B.long()]
