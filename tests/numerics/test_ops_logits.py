"""Masks, biases, penalties and reported log-probabilities against loops over tokens."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs.ops import constrain_logits, penalize_logits, top_logprobs
from graphs.ops.logits import MAX_TOP_LOGPROBS
from tests.helpers.steps import scattered_blocks


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


def packed_mask(allowed):
    """Pack one row of bools: token t at bit t mod 32 of word t // 32, as signed words."""
    words = []
    for begin in range(0, len(allowed), 32):
        word = sum(1 << i for i, on in enumerate(allowed[begin : begin + 32]) if on)
        words.append(word - 2**32 if word >= 2**31 else word)
    return words


@settings(max_examples=60)
@given(st.integers(1, 70), st.data())
def test_constrain_logits(vocab, data):
    torch.manual_seed(vocab)
    logits = torch.randn(3, vocab)
    logits[0, 0] = -math.inf
    masks, ids, values = [], [], []
    for _ in range(3):
        masks.append(data.draw(st.lists(st.booleans(), min_size=vocab, max_size=vocab)))
        used = data.draw(st.lists(st.integers(0, vocab - 1), max_size=4, unique=True))
        ids.append(used + [-1] * (4 - len(used)))
        values.append([data.draw(st.sampled_from([-3.5, 0.0, 2.0, 100.0])) for _ in range(4)])
    got = constrain_logits(
        logits, i32([packed_mask(m) for m in masks]), i32(ids), torch.tensor(values)
    )
    for row in range(3):
        for token in range(vocab):
            expected = logits[row, token].item()
            if token in ids[row]:
                expected += values[row][ids[row].index(token)]
            if not masks[row][token]:
                expected = -math.inf
            assert got[row, token].item() == torch.tensor(expected, dtype=torch.float32).item()


@settings(max_examples=60)
@given(st.data())
def test_penalize_logits(data):
    vocab, block_size, max_blocks = 7, 4, 3
    table = scattered_blocks(4, max_blocks, 12)
    cache = i32([[5] * block_size] * 12)  # stale tokens everywhere
    slots = data.draw(st.permutations([0, 1, 2, 3]))
    logits = torch.tensor([[-2.0, 0.0, 3.0, 1.0, -math.inf, 0.5, -1.0]] * 4)
    lengths, prompts, tokens = [], [], []
    for slot in slots:
        listed = data.draw(st.lists(st.integers(0, vocab - 1), max_size=12)) if slot else []
        for position, token in enumerate(listed):
            cache[table[slot, position // block_size], position % block_size] = token
        tokens.append(listed)
        lengths.append(len(listed))
        prompts.append(data.draw(st.integers(0, len(listed))))
    chosen = [
        [data.draw(st.sampled_from(values)) for _ in range(4)]
        for values in ([1.0, 1.25, 0.5], [0.0, 0.5, -1.0], [0.0, 0.25, -0.5])
    ]
    got = penalize_logits(
        logits,
        cache,
        table,
        i32(slots),
        i32(prompts),
        i32(lengths),
        *(torch.tensor(v) for v in chosen),
    )
    for row in range(4):
        repetition, presence, frequency = (v[row] for v in chosen)
        output = tokens[row][prompts[row] :]
        for token in range(vocab):
            value = logits[row, token].item()
            if token in tokens[row]:
                value = value / repetition if value > 0 else value * repetition
            count = output.count(token)
            value -= frequency * count + (presence if count else 0.0)
            assert got[row, token].item() == pytest.approx(value, rel=1e-6), (row, token)


def test_neutral_parameters_change_no_value():
    logits = torch.randn(2, 40)
    neutral = constrain_logits(logits, i32([[-1, -1]] * 2), i32([[-1, -1]] * 2), torch.ones(2, 2))
    assert torch.equal(neutral, logits)
    cache, table, one = i32([[3, 4]] * 3), i32([[0], [2]]), torch.ones(2)
    penalised = penalize_logits(
        logits, cache, table, i32([1, 0]), i32([1, 0]), i32([2, 0]), one, 0 * one, 0 * one
    )
    assert torch.equal(penalised, logits)


@pytest.mark.parametrize("vocab", [5, 20, 300])
def test_top_logprobs(vocab):
    logits = (torch.randn(6, vocab) * 2).round()  # many ties
    logits[0, :2] = torch.tensor([0.0, -0.0])
    logits[1, 3:] = -math.inf
    tokens = torch.randint(0, 3, (6,), dtype=torch.int32)
    logprob, rank, ids, top = top_logprobs(logits, tokens)
    for row, listed in enumerate(logits.tolist()):
        order = sorted(range(vocab), key=lambda i: (-listed[i], i))
        total = math.log(math.fsum(math.exp(v - max(listed)) for v in listed)) + max(listed)
        assert rank[row].item() == order.index(int(tokens[row])) + 1
        assert logprob[row].item() == pytest.approx(listed[int(tokens[row])] - total, abs=1e-6)
        best = order[:MAX_TOP_LOGPROBS]
        assert ids[row].tolist() == best
        assert top[row].tolist() == pytest.approx([listed[i] - total for i in best], abs=1e-6)
