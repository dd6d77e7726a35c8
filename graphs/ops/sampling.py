"""Sampling of tokens, and log-probabilities of given ones.

Random numbers are counter based: Philox4x32-10 keyed by the request's 64-bit seed, with the counter
(position, purpose). They depend on nothing else, so a request draws the same tokens in every batch
and on every device. Order of operations: mask and bias, penalties (graphs/ops/logits.py),
temperature, then top_p, min_p and top_k, each on the whole distribution, then the draw.

Letters: B rows, V vocabulary.
"""

import torch
from torch import Tensor
from torch.nn import functional

from graphs.op import EXACT, FP32_CLOSE, op

PURPOSE_SAMPLE = 0  # the ordinary draw of a token; other purposes get their own numbers

_MASK32 = 0xFFFFFFFF
# Constants of Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers", SC 2011.
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def _multiply_32(a: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32 x 32 bit product; int64 holds the halves, not the whole."""
    low = (a & 0xFFFF) * multiplier
    middle = (low >> 16) + (a >> 16) * multiplier
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(seed_B: Tensor, position_B: Tensor, purpose: int) -> tuple[Tensor, ...]:
    """Return four 32-bit words per row, each in an int64 tensor [B].

    Args:
        seed_B: key, int64 [B] (its 64 bits).
        position_B: low and high counter words, int64 [B].
        purpose: third counter word.
    """
    keys = [seed_B & _MASK32, (seed_B >> 32) & _MASK32]
    words = [position_B & _MASK32, (position_B >> 32) & _MASK32]
    words += [torch.full_like(seed_B, purpose), torch.zeros_like(seed_B)]
    for _ in range(_ROUNDS):
        high0, low0 = _multiply_32(words[0], _MULTIPLIERS[0])
        high1, low1 = _multiply_32(words[2], _MULTIPLIERS[1])
        words = [high1 ^ words[1] ^ keys[0], low1, high0 ^ words[3] ^ keys[1], low0]
        keys = [(k + i) & _MASK32 for k, i in zip(keys, _KEY_INCREMENTS, strict=True)]
    return tuple(words)


def uniform(seed_B: Tensor, position_B: Tensor, purpose: int) -> Tensor:
    """Return one float64 in [0, 1) per row, 53 random bits each."""
    first, second, _, _ = philox(seed_B, position_B, purpose)
    # An integer tensor times a number would be float32: convert first.
    return ((first >> 5).double() * 2.0**26 + (second >> 6).double()) * 2.0**-53


def _sample_sample(seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, 50, generator=generator) * 3
    temperature = torch.tensor([0.0, 1.0, 0.7, 1.3, 1.0, 0.0])
    top_p = torch.tensor([1.0, 1.0, 0.5, 0.9, 0.1, 1.0])
    top_k = torch.tensor([-1, -1, 5, 100, 3, 1], dtype=torch.int32)
    seeds = torch.randint(-(2**62), 2**62, (6,), generator=generator)
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.2, 0.0, 0.5])
    return logits, temperature, top_p, top_k, min_p, seeds, torch.arange(6)


@op(
    shape=lambda logits, temperature, top_p, top_k, *_: top_k.new_empty(logits.shape[0]),
    samples=_sample_sample,
    tolerance=EXACT,
)
def sample_tokens(
    logits_BV: Tensor,
    temperature_B: Tensor,
    top_p_B: Tensor,
    top_k_B: Tensor,
    min_p_B: Tensor,
    seeds_B: Tensor,
    positions_B: Tensor,
) -> Tensor:
    """Draw one token per row.

    Args:
        logits_BV: float32 [rows, vocab].
        temperature_B: float32; 0 takes the largest logit, the lowest id on ties.
        top_p_B: float32 in (0, 1]; a token stays while the mass strictly before it does not exceed
            top_p.
        top_k_B: int32, at most this many tokens stay; -1 = all.
        min_p_B: float32 in [0, 1]; a token stays while its probability is at least min_p times the
            largest.
        seeds_B: int64, one per request.
        positions_B: int64, position of the drawn token in its sequence.
    Returns:
        int32 [rows].
    Numerics: float64 probabilities, inverse of the cumulative sum in order of falling probability.
    """
    logits = logits_BV.double()
    greedy = temperature_B == 0
    divisor = torch.where(greedy, 1.0, temperature_B).double().unsqueeze(-1)
    scaled = (logits - logits.amax(-1, keepdim=True)) / divisor
    probability, order = torch.sort(torch.softmax(scaled, -1), dim=-1, descending=True, stable=True)
    mass = probability.cumsum(-1)
    before = functional.pad(mass[:, :-1], (1, 0))
    # Each rule keeps a run of the most likely tokens, so together they keep the shortest run.
    kept_p = (before <= top_p_B.double().unsqueeze(-1)).sum(-1)
    least = probability[:, :1] * min_p_B.double().unsqueeze(-1)
    kept_p = torch.minimum(kept_p, (probability >= least).sum(-1))
    kept_k = torch.where(top_k_B > 0, top_k_B, logits.shape[-1]).long()
    kept = torch.minimum(kept_p.clamp(min=1), kept_k.clamp(max=logits.shape[-1])).unsqueeze(-1)
    drawn = uniform(seeds_B, positions_B, PURPOSE_SAMPLE).unsqueeze(-1)
    rank = (mass <= drawn * mass.gather(1, kept - 1)).sum(-1, keepdim=True)
    sampled = order.gather(1, torch.minimum(rank, kept - 1)).squeeze(-1)
    return torch.where(greedy, logits_BV.argmax(-1), sampled).int()


def _sample_logprobs(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, 50, generator=generator) * 3
    return logits, torch.randint(0, 50, (6,), generator=generator, dtype=torch.int32)


@op(
    shape=lambda logits, targets: logits.new_empty(logits.shape[0]),
    samples=_sample_logprobs,
    tolerance=FP32_CLOSE,
)
def token_logprobs(logits_BV: Tensor, targets_B: Tensor) -> Tensor:
    """Return the log-probability of one given token per row.

    Args:
        logits_BV: float32 [rows, vocab].
        targets_B: int32 [rows].
    Returns:
        float32 [rows]; float64 inside.
    """
    logprobs = torch.log_softmax(logits_BV.double(), -1)
    return logprobs.gather(1, targets_B.long().unsqueeze(-1)).squeeze(-1).float()
