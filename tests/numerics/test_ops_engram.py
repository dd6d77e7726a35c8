"""Embedding, Engram hash, lookup and gate against loops written from model.md 5."""

import itertools
import math

import pytest
import torch

from graphs.ops import embed_streams, engram_gate, engram_lookup, engram_rows, select_rows
from model.engram_hash import hash_multipliers, hash_primes
from tests.helpers.compare import assert_rounded
from tests.helpers.scalar_formats import e4m3_value, e8m0_value

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embed_streams(dtype):
    weight = torch.randn(9, 8)
    ids = torch.tensor([3, 0, 8, 3], dtype=torch.int32)
    streams, pre = embed_streams(ids, weight, 4, dtype)
    for t, i in enumerate(ids.tolist()):
        for c in range(4):
            assert torch.equal(streams[t, c], weight[i].to(dtype))
    assert pre.tolist() == [[1, 0, 0, 0]] * 4
    assert torch.equal(select_rows(weight, ids), weight[[3, 0, 8, 3]])


ENGRAM_CHECK = {  # layer -> position -> rows of columns 0, 1, 7, 8, 15, 16, 23
    1: {
        0: [5702652, 24393184, 121476532, 131476717, 247482304, 257520185, 380066193],
        1: [5375420, 29139091, 120671888, 134150085, 242614010, 268365510, 370284647],
        4: [9269172, 16218591, 113170070, 139254896, 249285847, 267192101, 369543647],
    },
    14: {
        0: [14361964, 29977809, 120604547, 132225184, 252505246, 261362261, 372375971],
        1: [8024977, 23568579, 118730015, 130574332, 241843974, 259958122, 380810703],
        4: [15375077, 21723222, 113427231, 138792741, 248082575, 269839604, 383234265],
    },
}


@pytest.mark.parametrize(("index", "layer"), list(enumerate(ENGRAM_CHECK)))
def test_engram_rows_check_vectors(index, layer):
    multipliers = torch.tensor(hash_multipliers(layer, 99092, 4))
    primes = torch.tensor(hash_primes(2, 16000000, 4, 8)[index])
    offsets = primes.flatten().cumsum(0) - primes.flatten()
    ids = torch.tensor([0, 1000, 2000, 3000, 99091], dtype=torch.int32)
    positions = torch.arange(5, dtype=torch.int32)
    slots, starts = torch.ones(5, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    history = torch.full((2, 9), 77777, dtype=torch.int32)  # of another request: must not be read
    rows = engram_rows(
        ids, history, positions, slots, starts, multipliers, primes, offsets, torch.tensor(2)
    )
    for position, expected in ENGRAM_CHECK[layer].items():
        assert rows[position, [0, 1, 7, 8, 15, 16, 23]].tolist() == expected
    # The same rows token by token: look-back goes through the ring.
    for t in range(5):
        one = slice(t, t + 1)
        for back in range(t):
            history[1, back % 9] = ids[back]
        alone = engram_rows(
            ids[one],
            history,
            positions[one],
            slots[one],
            positions[one],
            multipliers,
            primes,
            offsets,
            torch.tensor(2),
        )
        assert torch.equal(alone, rows[one])


def test_engram_lookup():
    raw = torch.randint(0, 256, (20, 64)).to(torch.uint8)
    raw[(raw & 0x7F) == 0x7F] = 1
    scale = torch.randint(110, 130, (20, 2)).to(torch.uint8)
    rows = torch.randint(0, 20, (4, 3))
    for dtype in DTYPES:
        got = engram_lookup(rows, raw.view(torch.float8_e4m3fn), scale, dtype)
        assert got.shape == (4, 192)
        for t, c, k in itertools.product(range(4), range(3), range(64)):
            row = int(rows[t, c])
            expected = e4m3_value(int(raw[row, k])) * e8m0_value(int(scale[row, k // 32]))
            assert got[t, c * 64 + k].item() == expected
    plain = torch.randn(20, 64)
    assert torch.equal(
        engram_lookup(rows, plain, None, torch.bfloat16), plain[rows].flatten(1).bfloat16()
    )


def brute_gate(streams, kv, query_weight, key_weight):
    """Return (new streams, gate) of one token in float64."""
    c, d = len(streams), len(streams[0])
    value = kv[c * d :]
    gates, new = [], []
    for s in range(c):
        h, key = streams[s], kv[s * d : (s + 1) * d]
        rh = (math.fsum(v * v for v in h) / d + 1e-20) ** -0.5
        rk = (math.fsum(v * v for v in key) / d + 1e-20) ** -0.5
        weight = [q * k for q, k in zip(query_weight[s], key_weight[s], strict=True)]
        total = math.fsum(a * w * b for a, w, b in zip(h, weight, key, strict=True))
        total *= rh * rk * d**-0.5
        root = math.copysign(math.sqrt(max(abs(total), 1e-6)), total)
        gate = 1 / (1 + math.exp(-root))
        gates.append(gate)
        new.append([a + gate * v for a, v in zip(h, value, strict=True)])
    return new, gates


@pytest.mark.parametrize("dtype", DTYPES)
def test_engram_gate(dtype):
    t, c, d = 6, 4, 24
    streams, kv = torch.randn(t, c, d).to(dtype), torch.randn(t, (c + 1) * d).to(dtype)
    streams[1] *= 1e-10  # eps of the norm is visible
    streams[2, :, 1:] = 0  # one product per stream, both signs, below and above the floor
    streams[2, :, 0] = 1.0
    kv[2, : c * d] = 1.0
    kv[2, 0 : c * d : d] = torch.tensor([1e-9, -1e-9, 1e-3, -1e-3])
    streams[3] = 0
    query_weight, key_weight = torch.randn(c, d).to(dtype), torch.randn(c, d).to(dtype)
    query_weight[:, 0] = key_weight[:, 0] = 1.0
    got, gate = engram_gate(streams, kv, query_weight, key_weight, 1e-20)
    for i in range(t):
        new, gates = brute_gate(
            *(v.tolist() for v in (streams[i], kv[i], query_weight, key_weight))
        )
        assert_rounded(gate[i], torch.tensor(gates, dtype=torch.float64), 1e-6)
        assert_rounded(got[i], torch.tensor(new, dtype=torch.float64), 4e-6)
    floor = 1 / (1 + math.exp(-1e-3)) - 0.5
    offset = gate[2].double() - 0.5
    assert offset[:2].tolist() == pytest.approx([floor, -floor], abs=1e-7)
    assert offset[2] > 10 * floor
    assert offset[3] < -10 * floor
    assert (gate[3] - 0.5).abs().tolist() == pytest.approx([floor] * 4, abs=1e-7)
