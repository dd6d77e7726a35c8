"""Every sampling parameter against a brute-force definition, alone and in random combinations.

The definition works on plain lists and shares nothing with the ops: it states the order mask, bias,
repetition, frequency, presence, temperature, then top_p, min_p and top_k on the whole distribution.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs.ops import constrain_logits, penalize_logits, sample_tokens, top_logprobs
from graphs.ops.logits import MAX_TOP_LOGPROBS

VOCAB = 9
BLOCK = 4
# Upper 1e-6 quantiles of chi-square by degrees of freedom: a right sampler fails once in a million.
LIMITS = {1: 23.93, 2: 27.63, 3: 30.66, 4: 33.38, 5: 35.89, 6: 38.26, 7: 40.52, 8: 42.70}


def brute_logits(logits, p, prompt, output):
    """Apply masks, biases and penalties to one row."""
    result = []
    for token, value in enumerate(logits):
        value += p.get("logit_bias", {}).get(token, 0.0)
        if token in p.get("banned", ()) or token not in p.get("allowed", range(VOCAB)):
            value = -math.inf
        if token in prompt or token in output:
            rate = p.get("repetition_penalty", 1.0)
            value = value / rate if value > 0 else value * rate
        value -= p.get("frequency_penalty", 0.0) * output.count(token)
        value -= p.get("presence_penalty", 0.0) * (token in output)
        result.append(value)
    return result


def brute_distribution(logits, p):
    """Return token -> probability after temperature and the three filters."""
    temperature = p.get("temperature", 1.0)
    largest = max(logits)
    if temperature == 0:
        return {logits.index(largest): 1.0}
    weights = [math.exp((v - largest) / temperature) for v in logits]
    total = math.fsum(weights)
    ranked = sorted(range(VOCAB), key=lambda t: (-weights[t], t))
    kept, before = {}, 0.0
    for rank, token in enumerate(ranked):
        share = weights[token] / total
        is_in = (
            before <= p.get("top_p", 1.0)
            and share * total >= p.get("min_p", 0.0) * weights[ranked[0]]
        )
        if not is_in or rank >= p.get("top_k", VOCAB):
            break
        kept[token] = share
        before += share
    mass = math.fsum(kept.values())
    return {token: share / mass for token, share in kept.items() if share}


def mask_of(p):
    allowed = set(p.get("allowed", range(VOCAB))) - set(p.get("banned", ()))
    return sum(1 << token for token in allowed)


def device_logits(rows):
    """Run the ops over rows of (logits, parameters, prompt, output)."""
    longest = max(len(prompt) + len(output) for *_, prompt, output in rows)
    per_row = -(-longest // BLOCK)
    cache = torch.full(
        (1 + len(rows) * per_row, BLOCK), 7, dtype=torch.int32
    )  # rubbish behind the end
    table = torch.zeros(len(rows) + 1, per_row, dtype=torch.int32)
    bias_ids = torch.full((len(rows), 4), -1, dtype=torch.int32)
    bias_values = torch.zeros(len(rows), 4)
    for i, (_, p, prompt, output) in enumerate(rows):
        blocks = torch.arange(per_row) + 1 + i * per_row
        table[i + 1] = blocks.int()
        tokens = torch.tensor(prompt + output, dtype=torch.int32)
        flat = cache[blocks].flatten()
        flat[: len(tokens)] = tokens
        cache[blocks] = flat.view(per_row, BLOCK)
        for k, (token, value) in enumerate(p.get("logit_bias", {}).items()):
            bias_ids[i, k], bias_values[i, k] = token, value
    column = lambda name, default: torch.tensor([p.get(name, default) for _, p, *_ in rows])  # noqa: E731
    masks = torch.tensor([[mask_of(p)] for _, p, *_ in rows], dtype=torch.int32)
    logits = torch.tensor([logits for logits, *_ in rows])
    return penalize_logits(
        constrain_logits(logits, masks, bias_ids, bias_values),
        cache,
        table,
        torch.arange(1, len(rows) + 1, dtype=torch.int32),
        torch.tensor([len(prompt) for *_, prompt, _ in rows], dtype=torch.int32),
        torch.tensor([len(prompt) + len(output) for *_, prompt, output in rows], dtype=torch.int32),
        column("repetition_penalty", 1.0),
        column("presence_penalty", 0.0),
        column("frequency_penalty", 0.0),
    )


def draw(logits, p, count):
    rows = logits.expand(count, -1).contiguous()

    def full(name, default):
        return torch.full((count,), float(p.get(name, default)))

    top_k = torch.full((count,), p.get("top_k", -1), dtype=torch.int32)
    seeds = torch.arange(count) * 2654435761 + 17
    tokens = sample_tokens(
        rows,
        full("temperature", 1.0),
        full("top_p", 1.0),
        top_k,
        full("min_p", 0.0),
        seeds,
        seeds % 997,
    )
    return torch.bincount(tokens, minlength=VOCAB).tolist()


tokens = st.integers(0, VOCAB - 1)
parameters = st.fixed_dictionaries(
    {},
    optional={
        "logit_bias": st.dictionaries(
            tokens, st.sampled_from([-100.0, -2.5, 1.0, 50.0]), max_size=4
        ),
        "allowed": st.lists(tokens, min_size=1, unique=True),
        "banned": st.lists(tokens, max_size=2, unique=True),
        "repetition_penalty": st.sampled_from([0.7, 1.0, 1.3, 2.0]),
        "frequency_penalty": st.sampled_from([-2.0, 0.0, 0.5, 2.0]),
        "presence_penalty": st.sampled_from([-2.0, 0.0, 0.5, 2.0]),
    },
)
rows = st.tuples(
    st.lists(st.floats(-8, 8, width=32), min_size=VOCAB, max_size=VOCAB),
    parameters,
    st.lists(tokens, min_size=1, max_size=9),
    st.lists(tokens, max_size=9),
)


@settings(max_examples=200)
@given(st.lists(rows, min_size=1, max_size=6))
def test_logits_of_mixed_batches(batch):
    got = device_logits(batch)
    for i, (logits, p, prompt, output) in enumerate(batch):
        wanted = torch.tensor(brute_logits(logits, p, prompt, output))
        assert torch.equal(got[i].isfinite(), wanted.isfinite())
        finite = wanted.isfinite()
        assert torch.allclose(got[i][finite], wanted[finite], rtol=1e-5, atol=1e-5)
        if finite.any():
            best = got[i].argmax().item()
            assert wanted[best] >= wanted[finite].max() - 1e-5  # the greedy choice


CASES = [
    {},
    {"temperature": 0.6},
    {"top_p": 0.8},
    {"top_k": 3},
    {"min_p": 0.2},
    {"logit_bias": {1: 1.0, 3: -2.5}},
    {"allowed": [0, 2, 5]},
    {"banned": [0, 8]},
    {"repetition_penalty": 1.5},
    {"frequency_penalty": 0.5},
    {"presence_penalty": -1.0},
    {"temperature": 1.3, "top_p": 0.9, "min_p": 0.05, "top_k": 6, "presence_penalty": 0.4},
    {
        "temperature": 0.8,
        "repetition_penalty": 1.2,
        "logit_bias": {4: 1.5},
        "banned": [2],
        "top_p": 0.95,
    },
]
LOGITS = [0.3, -0.2, 1.1, 0.0, -1.0, 0.9, 0.4, -0.5, 0.7]
PROMPT, OUTPUT = [1, 2, 2, 5], [0, 5, 5, 8]
DRAWS = 100_000


def chi_square(counts, wanted):
    total = sum(counts)
    return sum((counts[t] - total * share) ** 2 / (total * share) for t, share in wanted.items())


@pytest.mark.parametrize("p", CASES, ids=[",".join(case) or "plain" for case in CASES])
def test_distribution(p):
    """100,000 draws against the exact distribution, bound stated beforehand."""
    (logits,) = device_logits([(LOGITS, p, PROMPT, OUTPUT)])
    wanted = brute_distribution(brute_logits(LOGITS, p, PROMPT, OUTPUT), p)
    counts = draw(logits, p, DRAWS)
    assert {t for t, c in enumerate(counts) if c} == set(wanted)
    assert chi_square(counts, wanted) < LIMITS[len(wanted) - 1]


def test_a_bias_of_two_percent_is_detected():
    """A sampler that gives one token two percent of all draws too many trips the same bound."""
    wanted = brute_distribution(LOGITS, {})
    share = wanted[2] + 0.02
    planted = torch.tensor(LOGITS)
    planted[2] += math.log(share / (1 - share) * (1 - wanted[2]) / wanted[2])
    assert chi_square(draw(planted, {}, DRAWS), wanted) > LIMITS[VOCAB - 1]


@settings(max_examples=100)
@given(
    st.lists(st.sampled_from([-3.0, 0.0, 0.5, 0.5, 2.0]), min_size=VOCAB, max_size=VOCAB),
    st.integers(0, VOCAB - 1),
)
def test_top_logprobs(logits, token):
    value = torch.tensor([logits])
    logprob, rank, ids, top = top_logprobs(value, torch.tensor([token], dtype=torch.int32))
    norm = math.log(math.fsum(math.exp(v) for v in logits))
    order = sorted(range(VOCAB), key=lambda t: (-logits[t], t))
    assert ids[0].tolist() == order[:MAX_TOP_LOGPROBS]
    assert rank.item() == order.index(token) + 1
    assert logprob.item() == pytest.approx(logits[token] - norm, abs=1e-6)
    assert top[0].tolist() == pytest.approx([logits[t] - norm for t in order], abs=1e-6)
