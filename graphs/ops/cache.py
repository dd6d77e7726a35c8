"""Writers of per-request state: rings indexed by position, and blocks indexed through a block
table.

Slot 0 and block 0 are reserved: padded rows and rows that store nothing write zeros there, so that
every writer
has a fixed shape, nothing real is touched, and the reserved entries stay zero.

Letters: T tokens, S slots, R ring size, E entries a block.
"""

import torch
from torch import Tensor

from graphs.op import EXACT, op


def _blank_unless(keep_T: Tensor, values: Tensor) -> Tensor:
    shaped = keep_T.view(-1, *(1,) * (values.dim() - 1))
    return torch.where(shaped, values, torch.zeros((), dtype=values.dtype, device=values.device))


def _sample_ring(seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    ring = torch.zeros(3, 5, 8)
    positions = torch.tensor([3, 4, 5, 6, 7, 8, 9, 0, 1, 0], dtype=torch.int32)
    slots = torch.tensor([1] * 7 + [2] * 2 + [0], dtype=torch.int32)
    ends = torch.tensor([10] * 7 + [2] * 2 + [1], dtype=torch.int32)
    return ring, torch.randn(10, 8, generator=generator), positions, slots, ends


@op(
    shape=lambda ring, values, positions, slots, chunk_ends: None,
    samples=_sample_ring,
    mutates=("ring",),
    tolerance=EXACT,
)
def write_ring(
    ring: Tensor, values: Tensor, positions_T: Tensor, slots_T: Tensor, chunk_ends_T: Tensor
) -> None:
    """Store this step's values in their requests' rings; position p goes to place p mod ring_size.

    Only the last ring_size positions of a chunk are stored, so no place is written twice.

    Args:
        ring: written, [num_slots, ring_size, ...].
        values: [num_tokens, ...], dtype of the ring.
        positions_T, slots_T, chunk_ends_T: int32 [num_tokens]; slot 0 marks a padded row.
    Source: model.md 9.3.
    """
    ring_size = ring.shape[1]
    keep = (slots_T > 0) & (positions_T >= chunk_ends_T - ring_size)
    place = torch.where(keep, positions_T % ring_size, 0).long()
    ring[torch.where(keep, slots_T, 0).long(), place] = _blank_unless(keep, values)


def block_entry(
    entries_T: Tensor, slots_T: Tensor, block_table: Tensor, entries_per_block: int
) -> tuple[Tensor, Tensor]:
    """Map logical entries (int [T, ...]) of requests to (block, offset), int64, same shape."""
    entry = entries_T.long()
    slot = slots_T.long().view(-1, *(1,) * (entry.dim() - 1))
    block = block_table[slot, entry // entries_per_block].long()
    return block, entry % entries_per_block


def _sample_blocks(seed: int) -> tuple[object, ...]:
    generator = torch.Generator().manual_seed(seed)
    cache = torch.zeros(6, 4, 8)
    table = torch.tensor([[0, 0, 0], [3, 1, 0], [5, 2, 4]], dtype=torch.int32)
    positions = torch.tensor([6, 7, 8, 9, 10, 0, 1, 0], dtype=torch.int32)
    slots = torch.tensor([1] * 5 + [2] * 2 + [0], dtype=torch.int32)
    ratio = 1 + seed % 2
    return cache, torch.randn(8, 8, generator=generator), positions, slots, table, ratio


@op(
    shape=lambda cache, values, positions, slots, block_table, ratio: None,
    samples=_sample_blocks,
    mutates=("cache",),
    tolerance=EXACT,
)
def write_blocks(
    cache: Tensor,
    values: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    block_table: Tensor,
    ratio: int,
) -> None:
    """Store the compressed entries that this step's tokens complete.

    Args:
        cache: written, [num_blocks, entries_per_block, ...].
        values: one entry per token, [num_tokens, ...]; used where the token ends its group of
            `ratio`.
        positions_T, slots_T: int32 [num_tokens]; slot 0 marks a padded row.
        block_table: int32 [num_slots, max_blocks].
        ratio: tokens per entry.
    Source: model.md 3.4, 9.1.
    """
    keep = (slots_T > 0) & ((positions_T + 1) % ratio == 0)
    block, offset = block_entry(positions_T // ratio, slots_T, block_table, cache.shape[1])
    cache[torch.where(keep, block, 0), torch.where(keep, offset, 0)] = _blank_unless(keep, values)
