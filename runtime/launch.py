"""Packing of a step plan into the static inputs of its bucket."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from graphs.static_io import StaticInputs
from runtime.request import Chunk


def pack_tokens(inputs: StaticInputs, chunks: Iterable[Chunk]) -> None:
    """Write the token rows of a step; the remaining rows are padding.

    Args:
        inputs: static inputs of a bucket with enough rows.
        chunks: contiguous pieces of requests; each takes `length` rows, in order.
    """
    inputs.clear()
    views = {name: as_array(inputs.views[name]) for name in _TOKEN_VIEWS}
    row = 0
    for chunk in chunks:
        end = chunk.start + chunk.length
        rows = slice(row, row + chunk.length)
        views["token_ids"][rows] = chunk.request.tokens_between(chunk.start, end)
        views["positions"][rows] = np.arange(chunk.start, end)
        views["slots"][rows] = chunk.request.slot
        views["chunk_starts"][rows] = chunk.start
        views["chunk_ends"][rows] = end
        row += chunk.length


def pack_sampling(inputs: StaticInputs, chunks: Sequence[Chunk]) -> None:
    """Write the sampling parameters of the chunks that are sampled, one logit row each, in
    order."""
    views = {name: as_array(inputs.views[name]) for name in _SAMPLE_VIEWS}
    last_rows = np.cumsum([chunk.length for chunk in chunks]) - 1
    index = 0
    for chunk, last_row in zip(chunks, last_rows, strict=True):
        if not chunk.is_sampled:
            continue
        params = chunk.request.params
        views["logit_rows"][index] = last_row
        views["seeds"][index] = as_int64(chunk.request.seed)
        views["sample_positions"][index] = chunk.start + chunk.length
        views["temperature"][index] = params.temperature
        views["top_p"][index] = params.top_p
        views["top_k"][index] = params.top_k
        views["min_p"][index] = params.min_p
        index += 1


def publish_blocks(block_table: Tensor, chunks: Iterable[Chunk]) -> None:
    """Write the block lists of the step's requests to the block table."""
    table = as_array(block_table)
    for chunk in chunks:
        blocks = chunk.request.block_ids
        table[chunk.request.slot, : len(blocks)] = blocks


def as_int64(seed: int) -> int:
    """Map an unsigned 64-bit seed to the int64 of the same bits."""
    seed &= 2**64 - 1
    return seed - 2**64 if seed >= 2**63 else seed


def as_array(tensor: Tensor) -> npt.NDArray[Any]:
    """Return a NumPy view of a CPU tensor; writes go through."""
    with torch.inference_mode():
        return tensor.numpy()


_TOKEN_VIEWS = ("token_ids", "positions", "slots", "chunk_starts", "chunk_ends")
_SAMPLE_VIEWS = (
    "logit_rows",
    "seeds",
    "sample_positions",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
)
