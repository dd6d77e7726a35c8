"""What happens to logits before sampling: masks, biases, penalties; log-probabilities beside it.

Every shape is fixed by the bucket; what a request does not use is neutral and changes no bit.

Letters: B rows, V vocabulary, W = ceil(V / 32) mask words, K bias entries, S slots.
"""

import torch
from torch import Tensor

from graphs.op import EXACT, FP32_CLOSE, op

MAX_TOP_LOGPROBS = 20  # alternatives reported per token
MAX_BIAS = 1024  # logit_bias entries per request


def _sample_constrain(seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, 50, generator=generator)
    mask = torch.randint(-(2**31), 2**31, (4, 2), generator=generator).int()
    ids = torch.tensor([[3, -1, 49], [-1, -1, -1], [0, 1, 2], [7, -1, -1]], dtype=torch.int32)
    return logits, mask | 1, ids, torch.randn(4, 3, generator=generator)


@op(
    shape=lambda logits, mask, bias_ids, bias_values: torch.empty_like(logits),
    samples=_sample_constrain,
    tolerance=EXACT,
)
def constrain_logits(
    logits_BV: Tensor, mask_BW: Tensor, bias_ids_BK: Tensor, bias_values_BK: Tensor
) -> Tensor:
    """Forbid tokens and add biases.

    Args:
        logits_BV: float32 [rows, vocab].
        mask_BW: allowed tokens, int32 [rows, ceil(vocab / 32)], token t at bit t mod 32 of word
            t // 32.
        bias_ids_BK: int32 [rows, K], -1 = unused; ids of a row are distinct.
        bias_values_BK: float32 [rows, K].
    Returns:
        float32 [rows, vocab], -inf where a token is not allowed.
    """
    vocab = logits_BV.shape[1]
    token = torch.arange(vocab, device=logits_BV.device)
    words = mask_BW[:, token // 32]
    allowed = (words >> (token % 32).int()) & 1 == 1
    is_used = bias_ids_BK >= 0
    extended = torch.zeros(logits_BV.shape[0], vocab + 1, device=logits_BV.device)
    place = torch.where(is_used, bias_ids_BK, vocab).long()  # unused entries fall off the end
    extended.scatter_(1, place, bias_values_BK)
    return (logits_BV + extended[:, :vocab]).masked_fill(~allowed, -torch.inf)


def _sample_penalize(seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 50, generator=generator) * 3
    tokens = torch.randint(0, 50, (6, 4), generator=generator, dtype=torch.int32)
    table = torch.tensor([[0, 0], [3, 1], [5, 2]], dtype=torch.int32)
    slots = torch.tensor([1, 2, 0], dtype=torch.int32)
    prompt_lengths = torch.tensor([2, 4, 0], dtype=torch.int32)
    lengths = torch.tensor([7, 5, 0], dtype=torch.int32)
    repetition = torch.tensor([1.3, 1.0, 1.0])
    return (
        logits,
        tokens,
        table,
        slots,
        prompt_lengths,
        lengths,
        repetition,
        torch.tensor([0.5, 0.0, 0.0]),
        torch.tensor([0.1, -1.0, 0.0]),
    )


@op(
    shape=lambda logits, *_: torch.empty_like(logits),
    samples=_sample_penalize,
    tolerance=FP32_CLOSE,
)
def penalize_logits(
    logits_BV: Tensor,
    token_cache: Tensor,
    block_table: Tensor,
    slots_B: Tensor,
    prompt_lengths_B: Tensor,
    lengths_B: Tensor,
    repetition_B: Tensor,
    presence_B: Tensor,
    frequency_B: Tensor,
) -> Tensor:
    """Penalise tokens that a request already holds.

    Args:
        logits_BV: float32 [rows, vocab].
        token_cache: token ids by block, int32 [num_blocks, block_size].
        block_table: int32 [num_slots, max_blocks].
        slots_B: int32 [rows]; 0 marks a padded row.
        prompt_lengths_B, lengths_B: tokens of the prompt, and in all, int32 [rows].
        repetition_B: logits of tokens of prompt or output are divided (positive ones) or multiplied
            by it; 1 = off.
        presence_B: subtracted once from tokens of the output; 0 = off.
        frequency_B: subtracted once per occurrence in the output; 0 = off.
    Returns:
        float32 [rows, vocab].
    """
    rows, vocab = logits_BV.shape
    tokens = token_cache[block_table[slots_B.long()].long()].flatten(1)
    position = torch.arange(tokens.shape[1], device=tokens.device)
    is_known = position < lengths_B.unsqueeze(-1)
    is_output = is_known & (position >= prompt_lengths_B.unsqueeze(-1))

    def count(used: Tensor) -> Tensor:
        place = torch.where(used, tokens, vocab).long()
        counts = torch.zeros(rows, vocab + 1, device=tokens.device)
        return counts.scatter_add_(1, place, torch.ones_like(place, dtype=counts.dtype))[:, :vocab]

    repetition = torch.where(count(is_known) > 0, repetition_B.unsqueeze(-1), 1.0)
    scaled = torch.where(logits_BV > 0, logits_BV / repetition, logits_BV * repetition)
    counts = count(is_output)
    scaled = scaled - frequency_B.unsqueeze(-1) * counts
    return scaled - presence_B.unsqueeze(-1) * (counts > 0)


def _sample_top(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, 50, generator=generator).round()  # ties
    return logits, torch.randint(0, 50, (6,), generator=generator, dtype=torch.int32)


@op(
    shape=lambda logits, tokens: (
        logits.new_empty(logits.shape[0]),
        tokens.new_empty(logits.shape[0]),
        tokens.new_empty((logits.shape[0], min(MAX_TOP_LOGPROBS, logits.shape[1]))),
        logits.new_empty((logits.shape[0], min(MAX_TOP_LOGPROBS, logits.shape[1]))),
    ),
    samples=_sample_top,
)
def top_logprobs(logits_BV: Tensor, tokens_B: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probabilities of given tokens and of the most likely ones.

    Args:
        logits_BV: unfiltered, float32 [rows, vocab].
        tokens_B: int32 [rows].
    Returns:
        logprob float32 [rows] and rank int32 [rows] (1 = most likely, ties to the lower id) of the
        given tokens; ids int32 and log-probabilities float32 [rows, 20] of the most likely tokens,
        falling, ties to the lower id.
    """
    logprobs = torch.log_softmax(logits_BV.double(), -1).float()
    ordered = torch.sort(logits_BV, dim=-1, descending=True, stable=True).indices
    top = ordered[:, :MAX_TOP_LOGPROBS]
    given = tokens_B.long().unsqueeze(-1)
    rank = (ordered == given).int().argmax(-1).int() + 1
    return logprobs.gather(1, given).squeeze(-1), rank, top.int(), logprobs.gather(1, top)
