"""Scores of compressed entries, and the selections made from them.

Letters: T tokens, h index heads, d index head channels, N entries, k selected, B candidate blocks.
"""

import torch
from torch import Tensor
from torch.nn import functional

from graphs.op import EXACT, Tolerance, op
from graphs.ops.quant import unpack_records
from graphs.ops.rows import multiply_exact, top_indices


def visible_entries(positions_T: Tensor, slots_T: Tensor, ratio: int) -> Tensor:
    """Return how many entries each token sees (int32); none for padded rows."""
    return torch.where(slots_T > 0, (positions_T + 1) // ratio, 0)


def _used_columns(visible_T: Tensor, num_columns: int) -> int:
    # Reading a length is free on a CPU and forbidden inside a captured device graph.
    return max(1, int(visible_T.max())) if visible_T.device.type == "cpu" else num_columns


def _sample_scores(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int]:
    generator = torch.Generator().manual_seed(seed)
    query, weights = (torch.randn(s, generator=generator) for s in ((4, 8, 32), (4, 8)))
    keys = torch.randn(6, 4, 32, generator=generator)
    table = torch.tensor([[0, 0], [3, 1], [5, 2]], dtype=torch.int32)
    slots = torch.tensor([1, 1, 2, 0], dtype=torch.int32)
    positions = torch.tensor([6, 7, 2, 0], dtype=torch.int32)
    return query, weights, keys, table, slots, positions, 1 + seed % 2


@op(
    shape=lambda query, weights, keys, block_table, slots, positions, ratio: query.new_empty(
        (query.shape[0], block_table.shape[1] * keys.shape[1]), dtype=torch.float32
    ),
    samples=_sample_scores,
    tolerance=Tolerance(1e-4, 1e-4),
)
def index_scores(
    query_Thd: Tensor,
    weights_Th: Tensor,
    key_cache: Tensor,
    block_table: Tensor,
    slots_T: Tensor,
    positions_T: Tensor,
    ratio: int,
) -> Tensor:
    """Score every compressed entry for every token: sum over heads of relu(q . k) * w, scaled.

    Args:
        query_Thd: rotated, fake-quantised, [num_tokens, heads, d].
        weights_Th: head weights, [num_tokens, heads].
        key_cache: index keys, [num_blocks, entries_per_block, d or record bytes].
        block_table: int32 [num_slots, max_blocks].
        slots_T, positions_T: int32 [num_tokens].
        ratio: tokens per entry.
    Returns:
        float32 [num_tokens, max_blocks * entries_per_block], -inf where the entry is not visible.
    Numerics: float32 from exact operands. Each block of entries is one product of fixed shape per
        token.
    Source: model.md 3.5, 3.6.
    """
    num_tokens, num_heads, head_dim = query_Thd.shape
    per_block = key_cache.shape[1]
    num_entries = block_table.shape[1] * per_block
    visible = visible_entries(positions_T, slots_T, ratio)
    scores = torch.full((num_tokens, num_entries), -torch.inf, device=query_Thd.device)
    query = query_Thd.float()
    weights = (weights_Th.float() * (head_dim**-0.5 * num_heads**-0.5)).unsqueeze(1)
    # Decode once per request where tokens outnumber slots, else once per token.
    by_slot = num_tokens > block_table.shape[0]
    table = block_table if by_slot else block_table[slots_T.long()]
    for column in range(-(-_used_columns(visible, num_entries) // per_block)):
        keys = unpack_records(key_cache[table[:, column].long()], "fp4_32")
        keys = keys[slots_T.long()] if by_slot else keys
        dots = multiply_exact(query, keys.transpose(1, 2)).relu()
        block = slice(column * per_block, (column + 1) * per_block)
        scores[:, block] = multiply_exact(weights, dots).squeeze(1)
    entry = torch.arange(num_entries, device=scores.device)
    return scores.masked_fill_(entry >= visible.unsqueeze(-1), -torch.inf)


def _sample_select(seed: int) -> tuple[Tensor, int, Tensor | None, int]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(5, 40, generator=generator).relu()  # exact zeros tie
    scores[torch.arange(40) >= torch.tensor([[40], [33], [3], [1], [0]])] = -torch.inf
    blocks = torch.tensor([[0, 2, 4, 9], [1, 3, 8, -1], [0, -1, -1, -1], [0, -1, -1, -1], [-1] * 4])
    return scores, 8, blocks.int() if seed % 2 else None, 4


@op(
    shape=lambda scores, topk, candidates, block_size: scores.new_empty(
        (scores.shape[0], topk), dtype=torch.int32
    ),
    samples=_sample_select,
    tolerance=EXACT,
)
def select_entries(
    scores_TN: Tensor, topk: int, candidates_TB: Tensor | None, block_size: int
) -> Tensor:
    """Select the entries with the largest scores, inside the candidate blocks where there are any.

    Args:
        scores_TN: float32 [num_tokens, N], -inf = not visible; what is visible comes first.
        topk: entries per token.
        candidates_TB: candidate blocks, int32 [num_tokens, B], -1 = none; None = no restriction.
        block_size: entries per candidate block.
    Returns:
        int32 [num_tokens, topk], ascending, -1 = none. Ties go to the lower entry.
    Source: model.md 3.6, 3.7.
    """
    num_visible = (scores_TN > -torch.inf).sum(-1)
    scores = scores_TN[:, : _used_columns(num_visible, scores_TN.shape[1])]
    if candidates_TB is not None:
        num_blocks = -(-scores.shape[1] // block_size)
        kept = torch.zeros(scores.shape[0], num_blocks + 1, dtype=torch.bool, device=scores.device)
        spot = torch.where(candidates_TB < 0, num_blocks, candidates_TB).long()
        kept.scatter_(1, spot.clamp(max=num_blocks), True)
        allowed = kept[:, :num_blocks].repeat_interleave(block_size, 1)[:, : scores.shape[1]]
        scores = scores.masked_fill(~allowed, -torch.inf)
    return top_indices(scores, topk)


def _sample_candidates(seed: int) -> tuple[Tensor, Tensor, Tensor, int, int, int]:
    scores, _, _, _ = _sample_select(seed)
    positions = torch.tensor([39, 32, 2, 0, 0], dtype=torch.int32)
    return scores, positions, torch.tensor([1, 1, 2, 3, 0], dtype=torch.int32), 1, 4, 4


@op(
    shape=lambda scores, positions, slots, ratio, topk_blocks, block_size: scores.new_empty(
        (scores.shape[0], topk_blocks), dtype=torch.int32
    ),
    samples=_sample_candidates,
    tolerance=EXACT,
)
def select_candidate_blocks(
    scores_TN: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    ratio: int,
    topk_blocks: int,
    block_size: int,
) -> Tensor:
    """Select the blocks of entries that later index sources may choose from.

    A block scores as its best visible entry; the block of the newest visible entry is always kept.

    Args:
        scores_TN: float32 [num_tokens, N], -inf = not visible.
        positions_T, slots_T: int32 [num_tokens].
        ratio: tokens per entry.
        topk_blocks: candidate_topk_blocks.
        block_size: candidate_block_size.
    Returns:
        int32 [num_tokens, topk_blocks], ascending, -1 = none.
    Source: model.md 3.7.
    """
    visible = visible_entries(positions_T, slots_T, ratio)
    scores = scores_TN[:, : _used_columns(visible, scores_TN.shape[1])]
    padded = functional.pad(scores, (0, -scores.shape[1] % block_size), value=-torch.inf)
    best = padded.unflatten(1, (-1, block_size)).amax(-1)
    newest = (visible - 1) // block_size
    block = torch.arange(best.shape[1], device=best.device)
    pinned = (block == newest.unsqueeze(-1)) & (visible > 0).unsqueeze(-1)
    return top_indices(best.masked_fill(pinned, torch.inf), topk_blocks)
