"""Engram hash constants against the released model's and against the golden ones."""

import pytest
import torch

from model.config import ModelConfig
from model.engram_hash import engram_constants, hash_multipliers, hash_primes, is_prime
from tests.helpers.goldens import TEXT_CASES, golden_dir, golden_expected
from tests.helpers.production import production_config

# Last three digits of 16000xxx, by layer and n-gram size.
PRODUCTION_PRIMES = [
    [
        [57, 79, 81, 97, 121, 129, 133, 183],
        [189, 207, 211, 253, 277, 289, 307, 321],
        [339, 381, 393, 399, 403, 409, 447, 463],
    ],
    [
        [477, 487, 499, 507, 511, 573, 609, 627],
        [667, 669, 693, 697, 711, 729, 759, 769],
        [781, 799, 813, 819, 841, 877, 879, 889],
    ],
]
PRODUCTION_MULTIPLIERS = [
    [76632096046245, 4839876093313, 35959672319349, 73987337458391],
    [67716810739261, 51510806800915, 30921347202721, 82619226485591],
]
COLUMNS = [0, 1, 7, 8, 15, 16, 23]
# Compressed ids [0, 1000, 2000, 3000, 99091] and pad 2: (layer row, look-back, table rows).
HASH_ROWS = [
    (
        0,
        [0, 2, 2, 2],
        [5702652, 24393184, 121476532, 131476717, 247482304, 257520185, 380066193],
    ),
    (
        0,
        [1000, 0, 2, 2],
        [5375420, 29139091, 120671888, 134150085, 242614010, 268365510, 370284647],
    ),
    (
        0,
        [99091, 3000, 2000, 1000],
        [9269172, 16218591, 113170070, 139254896, 249285847, 267192101, 369543647],
    ),
    (
        1,
        [0, 2, 2, 2],
        [14361964, 29977809, 120604547, 132225184, 252505246, 261362261, 372375971],
    ),
    (
        1,
        [1000, 0, 2, 2],
        [8024977, 23568579, 118730015, 130574332, 241843974, 259958122, 380810703],
    ),
    (
        1,
        [99091, 3000, 2000, 1000],
        [15375077, 21723222, 113427231, 138792741, 248082575, 269839604, 383234265],
    ),
]


@pytest.fixture(scope="module")
def production():
    return engram_constants(ModelConfig.from_dict(production_config()))


def hash_rows(constants, layer_row, tokens):
    """Hash one position by the definition, in Python integers."""
    multipliers = constants.multipliers[layer_row].tolist()
    primes = constants.primes[layer_row].tolist()
    offsets = constants.offsets[layer_row].tolist()
    mixed = tokens[0] * multipliers[0]
    rows = []
    for distance in range(1, len(tokens)):
        mixed ^= tokens[distance] * multipliers[distance]
        rows += [mixed % prime for prime in primes[distance - 1]]
    assert mixed < 2**63
    return [row + offset for row, offset in zip(rows, offsets, strict=True)]


def test_production_multipliers(production):
    assert production.multipliers.tolist() == PRODUCTION_MULTIPLIERS
    assert production.multipliers.dtype == torch.int64


def test_multiplier_bound_keeps_the_product_in_int64():
    bound = (2**63 - 1) // 99092 // 2
    assert bound == 46539438283891
    for layer in range(40):
        for multiplier in hash_multipliers(layer, 99092, 4):
            assert multiplier % 2 == 1
            assert 0 < multiplier <= 2 * (bound - 1) + 1
            assert multiplier * 99091 < 2**63


def test_production_primes(production):
    expected = [[[16000000 + p for p in heads] for heads in sizes] for sizes in PRODUCTION_PRIMES]
    assert production.primes.tolist() == expected
    assert production.primes.flatten(1).sum(1).tolist() == [384006168, 384016682]


def test_offsets_are_exclusive_prefix_sums(production):
    assert production.offsets[0, :3].tolist() == [0, 16000057, 16000057 + 16000079]
    last = production.offsets[:, -1] + production.primes.flatten(1)[:, -1]
    assert last.tolist() == [384006168, 384016682]


@pytest.mark.parametrize(("layer_row", "tokens", "expected"), HASH_ROWS)
def test_hash_rows(production, layer_row, tokens, expected):
    rows = hash_rows(production, layer_row, tokens)
    assert [rows[column] for column in COLUMNS] == expected


def test_golden_constants():
    constants = engram_constants(ModelConfig.from_dir(golden_dir("text-fp32")))
    expected = golden_expected("text-fp32")
    for name in ("multipliers", "primes", "offsets"):
        assert torch.equal(getattr(constants, name), expected[f"engram.{name}"]), name


@pytest.mark.parametrize("case", [*TEXT_CASES, "vision"])  # dspark has no such tap
def test_golden_rows(case):
    config = ModelConfig.from_dir(golden_dir(case))
    text = config.text_config
    constants = engram_constants(config)
    expected = golden_expected(case)
    token_map = expected["engram.token_map"].tolist()
    ids = expected["p1.input_ids"].tolist()
    rows_TLC = expected["p1.taps.engram_rows"]
    pad = token_map[text.engram_pad_token_id]
    has_images = config.vision_config is not None
    for position in range(len(ids)):
        tokens, is_blocked = [], False
        for distance in range(text.engram_max_ngram_size):
            past = position - distance
            is_blocked = is_blocked or past < 0
            is_blocked = is_blocked or (has_images and ids[past] == config.image_token_id)
            tokens.append(pad if is_blocked else token_map[ids[past]])
        for row in range(len(text.engram_layer_ids)):
            expected_rows = rows_TLC[position, row].tolist()
            assert hash_rows(constants, row, tokens) == expected_rows, (position, row)


def test_no_engram_layers_give_empty_constants():
    raw = production_config()
    raw["text_config"] |= {"engram_layer_ids": [], "engram_num_embeddings": []}
    constants = engram_constants(ModelConfig.from_dict(raw))
    assert constants.multipliers.shape == (0, 4)
    assert constants.primes.shape == (0, 3, 8)
    assert constants.offsets.shape == (0, 24)


def test_primes_are_unique_and_start_at_the_config_value():
    primes = hash_primes(2, 61, 4, 2)
    flat = [prime for sizes in primes for heads in sizes for prime in heads]
    assert flat == [61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109]


def test_is_prime_against_trial_division():
    for number in range(2000):
        by_division = number > 1 and all(number % d for d in range(2, int(number**0.5) + 1))
        assert is_prime(number) == by_division, number
    # A product of two primes near the production start, strong pseudoprimes, a Carmichael number.
    for number in (15999989 * 16000057, 2047, 3277, 3215031751, 561):
        assert not is_prime(number), number
    assert is_prime(16000057)
    assert is_prime(2**61 - 1)
