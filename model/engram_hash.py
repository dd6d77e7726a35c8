"""Constants of the Engram hash: multipliers, primes and column offsets.

They are not stored in the checkpoint. Every implementation derives them from the config, and a slip
rehashes every row while the model only gets a little worse, so the sums of the primes are checked
against the config at load.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from model.config import ModelConfig

_INT64_MAX = 2**63 - 1
# Seed of a layer's multipliers = this * layer. Source: official DeepSeek-V4.1-Flash inference code.
_LAYER_SEED = 10007

# These witnesses decide primality for every number below 3.3e24, which covers any table that fits a
# machine.
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


@dataclass(frozen=True, slots=True)
class EngramConstants:
    """Constants of the Engram hash; rows are the layers of `engram_layer_ids` in order.

    Args:
        multipliers: int64 [layers, engram_max_ngram_size], odd, one for each look-back distance.
        primes: int64 [layers, engram_max_ngram_size - 1, engram_n_heads], rows of each column's
            range.
        offsets: int64 [layers, columns], first row of each column; column = (n - 2) *
            engram_n_heads + head.
    """

    multipliers: torch.Tensor
    primes: torch.Tensor
    offsets: torch.Tensor


def engram_constants(config: "ModelConfig") -> EngramConstants:
    """Derive the hash constants of all Engram layers; empty tensors if there are none.

    Source: DeepSeek-V4.1-Flash release, Engram; multipliers from NumPy's PCG64, so that a hash
        never overflows int64.
    """
    text = config.text_config
    layers, size, heads = (
        len(text.engram_layer_ids),
        text.engram_max_ngram_size,
        text.engram_n_heads,
    )
    multipliers = [
        hash_multipliers(layer, text.engram_compressed_vocab_size, size)
        for layer in text.engram_layer_ids
    ]
    primes = hash_primes(layers, text.engram_vocab_size, size, heads)
    primes_LNH = torch.tensor(primes, dtype=torch.int64).reshape(layers, max(size - 1, 0), heads)
    flat_LC = primes_LNH.flatten(1)
    return EngramConstants(
        multipliers=torch.tensor(multipliers, dtype=torch.int64).reshape(layers, size),
        primes=primes_LNH,
        offsets=flat_LC.cumsum(1) - flat_LC,
    )


def hash_multipliers(layer: int, compressed_vocab_size: int, size: int) -> list[int]:
    """Draw the odd multipliers of one layer, one for each of `size` look-back distances."""
    bound = _INT64_MAX // compressed_vocab_size // 2
    drawn = np.random.default_rng(_LAYER_SEED * layer).integers(0, bound, size=size, dtype=np.int64)
    return [int(value) * 2 + 1 for value in drawn]


def hash_primes(
    num_layers: int, start: int, max_ngram_size: int, num_heads: int
) -> list[list[list[int]]]:
    """Choose the primes of every column: [layer][n-gram size - 2][head].

    Each (layer, n-gram size) searches upwards from `start` and takes primes that no earlier one has
    taken.

    Args:
        num_layers: Engram layers.
        start: `engram_vocab_size`; the search begins at it (at one less, exclusive).
        max_ngram_size: longest n-gram; sizes 2 to this have primes.
        num_heads: primes for each n-gram size.
    """
    # One ascending walk is the same as restarting with a set of used primes, as each search skips
    # all of them.
    candidate = start - 1
    primes: list[list[list[int]]] = []
    for _ in range(num_layers):
        sizes: list[list[int]] = []
        for _ in range(max_ngram_size - 1):
            heads: list[int] = []
            while len(heads) < num_heads:
                candidate += 1
                if is_prime(candidate):
                    heads.append(candidate)
            sizes.append(heads)
        primes.append(sizes)
    return primes


def is_prime(number: int) -> bool:
    """Decide primality exactly (Miller-Rabin with fixed witnesses)."""
    if number < 2:
        return False
    for prime in _WITNESSES:
        if number % prime == 0:
            return number == prime
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    return all(_is_probable_prime(number, base, odd, twos) for base in _WITNESSES)


def _is_probable_prime(number: int, base: int, odd: int, twos: int) -> bool:
    power = pow(base, odd, number)
    if power in (1, number - 1):
        return True
    for _ in range(twos - 1):
        power = power * power % number
        if power == number - 1:
            return True
    return False
