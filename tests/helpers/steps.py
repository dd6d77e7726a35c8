"""Steps as flat token rows, and the state that earlier steps would have left behind."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one request in a step."""

    slot: int
    start: int
    length: int


@dataclass(frozen=True)
class Step:
    """The per-token inputs of a step: int32 [num_tokens] each."""

    chunks: tuple[Chunk, ...]
    positions: Tensor
    slots: Tensor
    chunk_starts: Tensor
    chunk_ends: Tensor

    @property
    def num_tokens(self) -> int:
        """Token rows, padded ones included."""
        return self.positions.shape[0]

    @property
    def num_real(self) -> int:
        """Token rows that belong to a request; they come first."""
        return sum(chunk.length for chunk in self.chunks)

    def rows(self, chunk: Chunk) -> slice:
        """Return the rows of one chunk."""
        begin = 0
        for other in self.chunks:
            if other is chunk:
                return slice(begin, begin + chunk.length)
            begin += other.length
        raise KeyError(chunk)


def make_step(chunks: list[Chunk], num_padded: int = 0) -> Step:
    """Lay chunks out one after the other, then padded rows as the runtime makes them (all zero)."""
    rows = [
        (chunk.start + i, chunk.slot, chunk.start, chunk.start + chunk.length)
        for chunk in chunks
        for i in range(chunk.length)
    ]
    rows += [(0, 0, 0, 0)] * num_padded
    columns = torch.tensor(rows, dtype=torch.int32).t().contiguous()
    return Step(tuple(chunks), *columns)


def step_values(step: Step, histories: dict[int, Tensor]) -> Tensor:
    """Return the step's rows of per-request values [positions, ...]; padded rows are all ones."""
    parts = [histories[c.slot][c.start : c.start + c.length] for c in step.chunks]
    example = parts[0]
    padded = torch.ones((step.num_tokens - step.num_real, *example.shape[1:]))
    return torch.cat([*parts, padded.to(example.dtype)])


def ring_before(
    step: Step, histories: dict[int, Tensor], num_slots: int, ring_size: int, garbage: Tensor
) -> Tensor:
    """Return rings as earlier steps leave them; places never written hold `garbage` (0 in slot 0).

    Args:
        garbage: a scalar of the dtype of the values.
    """
    example = next(iter(histories.values()))
    ring = garbage.to(example.dtype).expand(num_slots, ring_size, *example.shape[1:]).clone()
    ring[0] = 0
    for chunk in step.chunks:
        for position in range(max(0, chunk.start - ring_size), chunk.start):
            ring[chunk.slot, position % ring_size] = histories[chunk.slot][position]
    return ring


def scattered_blocks(num_slots: int, max_blocks: int, num_blocks: int, seed: int = 0) -> Tensor:
    """Return a block table whose requests own distinct blocks in random order; slot 0 owns none."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(num_blocks - 1, generator=generator) + 1
    table = torch.zeros(num_slots, max_blocks, dtype=torch.int32)
    table[1:] = order[: (num_slots - 1) * max_blocks].view(num_slots - 1, max_blocks).int()
    return table
