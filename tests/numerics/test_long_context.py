"""Rows deep in a long prompt against definitions in float64 that share nothing with the ops.

The prompt runs chunk by chunk through replays of traced units, with the real selection sizes, so
that the candidate blocks really exclude visible entries. The log holds the table of results: run
pytest with `-o log_cli=true --log-cli-level=INFO --log-cli-format="%(message)s"`.
"""

import logging

import numpy as np
import pytest

from tests.helpers.long_context import SLOT, LongCase, run_long_context
from tests.helpers.scalar_formats import (
    e2m1_value,
    e4m3_value,
    e8m0_value,
    f32,
    record_of,
)

logger = logging.getLogger(__name__)

SMALL = LongCase(
    num_tokens=700,
    chunk=64,
    sample_from=256,
    block_size=16,
    window=16,
    index_topk=24,
    topk_blocks=64,
    candidate_block_size=4,
)
CANDIDATE_LAYER, READER = 2, 4
SOURCE_OF = {1: 1, 2: 2, 3: 2, 4: 2}  # layer -> layer whose compressed entries it reads
INDEX_SOURCE_OF = {1: 1, 2: 2, 3: 2, 4: 4}
RATIO = {0: 0, 1: 2, 2: 1, 3: 1, 4: 1}
SOURCES, INDEX_LAYERS = (1, 2), (1, 2, 4)

E4M3 = np.array([e4m3_value(b) for b in range(256)])
E2M1 = np.array([e2m1_value(c) for c in range(16)])
E8M0 = np.array([e8m0_value(b) for b in range(256)])


# ---- decoding and small definitions --------------------------------------------------------------


def decode(records, fmt):
    """Decode cache records [..., bytes] to float64."""
    raw = records.numpy()
    if fmt == "fp8_32":
        dim = raw.shape[-1] * 32 // 33
        return E4M3[raw[..., :dim]] * np.repeat(E8M0[raw[..., dim:]], 32, -1)
    group = 16 if fmt == "fp4_16" else 32
    size = raw.shape[-1] // (group // 2 + 1) * group // 2
    data, scale = raw[..., :size], raw[..., size:]
    codes = np.stack((data & 15, data >> 4), -1).reshape(*data.shape[:-1], -1)
    table = E4M3 if fmt == "fp4_16" else E8M0
    return E2M1[codes] * np.repeat(table[scale], group, -1)


def entries_of(run, layer, name, fmt):
    """Read a request's entries [N, D] through its block table."""
    table = run.executor.block_table[SLOT].long()
    blocks = run.executor.caches[f"cache.layers.{layer}.{name}"][table]
    return decode(blocks.flatten(0, 1), fmt)


def weight(run, name):
    return run.executor.tensors[name].double().numpy()


def norm(x, scale):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-20) * scale


def rotate(run, x, positions, is_inverse=False, name="compress"):
    """Rotate the last channels of x [rows, ..., D] by float32 angles."""
    frequencies = run.executor.tensors[f"const.inv_freq.{name}"].numpy()
    angles = np.asarray(positions, np.float32)[:, None] * frequencies
    assert angles.dtype == np.float32
    turn = np.exp((-1j if is_inverse else 1j) * angles.astype(np.float64))
    turn = turn.reshape(len(turn), *(1,) * (x.ndim - 2), -1)
    first = x.shape[-1] - 2 * frequencies.shape[0]
    pairs = (x[..., first::2] + 1j * x[..., first + 1 :: 2]) * turn
    out = x.copy()
    out[..., first::2], out[..., first + 1 :: 2] = pairs.real, pairs.imag
    return out


def attention_input(run, layer, positions):
    """The normed, folded input of a layer's attention at some positions."""
    streams, pre = (v[positions].double().numpy() for v in run.inputs[layer])
    folded = (streams * pre[..., None]).sum(1)
    return norm(folded, weight(run, f"layers.{layer}.attn_norm.weight"))


def query_latent(run, layer):
    x = attention_input(run, layer, run.positions)
    latent = x @ weight(run, f"layers.{layer}.attn.wq_a.weight").T
    return norm(latent, weight(run, f"layers.{layer}.attn.q_norm.weight"))


def rope_name(layer):
    return "compress" if RATIO[layer] else "window"


def report(what, value, limit):
    logger.info("%-42s %9.2g   limit %.0e", what, value, limit)
    assert value <= limit, what


def relative(actual, expected):
    """Largest difference over the rms of the expected values."""
    return np.abs(np.asarray(actual, np.float64) - expected).max() / np.sqrt((expected**2).mean())


def changed_codes(decoded, exact, fmt):
    """Share of channels whose stored value is not the quantisation of `exact` [rows, D]."""
    expected = np.array([record_of([f32(v) for v in row], fmt)[1] for row in exact])
    return (expected != decoded).mean()


# ---- checks --------------------------------------------------------------------------------------


def check_queries_and_window_latents(run):
    for layer in RATIO:
        prefix = f"layers.{layer}.attn"
        query = query_latent(run, layer) @ weight(run, f"{prefix}.wq_b.weight").T
        query = rotate(
            run, query.reshape(len(run.positions), 4, -1), run.positions, name=rope_name(layer)
        )
        got = run.ops["sparse_attention", layer]["query_THD"].numpy()
        report(f"layer {layer}: query", relative(got, query), 2e-5)
        latent = attention_input(run, layer, run.positions) @ weight(run, f"{prefix}.wkv.weight").T
        latent = norm(latent, weight(run, f"{prefix}.kv_norm.weight"))
        latent = rotate(run, latent, run.positions, name=rope_name(layer))
        stored = decode(run.window_records[layer][run.positions], "fp8_32")
        # A value on a rounding boundary may take either code.
        changed = changed_codes(stored, latent, "fp8_32")
        report(f"layer {layer}: window codes changed", changed, 1e-3)


def compressed_latents(run, layer, entries):
    """Latents of some entries of a source layer, before rotation."""
    prefix, ratio = f"layers.{layer}.attn.compressor", RATIO[layer]
    tokens = np.asarray(entries)[:, None] * ratio + np.arange(ratio)
    x = attention_input(run, layer, tokens.reshape(-1))
    value = (x @ weight(run, f"{prefix}.wkv.weight").T).reshape(len(entries), ratio, -1)
    if ratio > 1:
        gate = (x @ weight(run, f"{prefix}.wgate.weight").T).reshape(value.shape)
        power = np.exp(gate - gate.max(1, keepdims=True))
        value = power / power.sum(1, keepdims=True) * value
    return norm(value.sum(1), weight(run, f"{prefix}.norm.weight"))


def check_compressed_entries_and_index_keys(run, layer):
    ratio = RATIO[layer]
    last = run.case.num_tokens // ratio
    per_chunk = run.case.chunk // ratio
    entries = [0, 1, per_chunk - 1, per_chunk, last - 1]
    entries += np.linspace(2, last - 2, 60).astype(int).tolist()
    latent = compressed_latents(run, layer, entries)
    positions = np.asarray(entries) * ratio
    stored = entries_of(run, layer, "compressed", "fp4_16")[entries]
    changed = changed_codes(stored, rotate(run, latent, positions), "fp4_16")
    report(f"layer {layer}: compressed codes changed", changed, 2e-3)
    prefix = f"layers.{layer}.attn.indexer"
    key = norm(
        latent @ weight(run, f"{prefix}.wk.weight").T, weight(run, f"{prefix}.k_norm.weight")
    )
    stored = entries_of(run, layer, "index_key", "fp4_32")[entries]
    changed = changed_codes(stored, rotate(run, key, positions), "fp4_32")
    report(f"layer {layer}: index key codes changed", changed, 2e-3)


def visible_counts(run, layer):
    return [(position + 1) // RATIO[layer] for position in run.positions]


def check_index_scores(run, layer):
    call = INDEX_LAYERS.index(layer)
    recorded = run.ops["index_scores", call]
    prefix = f"layers.{layer}.attn.indexer"
    query = (query_latent(run, layer) @ weight(run, f"{prefix}.wq_b.weight").T).reshape(
        len(run.positions), 4, 32
    )
    exact = rotate(run, query, run.positions).reshape(-1, 32)
    got = recorded["query_Thd"].reshape(-1, 32).numpy()
    report(f"layer {layer}: query codes changed", changed_codes(got, exact, "fp4_32"), 2e-3)
    head_weights = (
        attention_input(run, layer, run.positions) @ weight(run, f"{prefix}.weights_proj.weight").T
    )
    error = relative(recorded["weights_Th"], head_weights)
    report(f"layer {layer}: head weights", error, 2e-5)

    keys = entries_of(run, SOURCE_OF[layer], "index_key", "fp4_32")
    scores = run.taps[f"value.layers.{layer}.tap.index_scores"].numpy()
    worst, all_expected = 0.0, []
    for row, visible in enumerate(visible_counts(run, layer)):
        assert np.isneginf(scores[row, visible:]).all()
        dots = np.maximum(keys[:visible] @ recorded["query_Thd"][row].double().numpy().T, 0)
        weights = recorded["weights_Th"][row].double().numpy() * 32**-0.5 * 4**-0.5
        expected = dots @ weights
        all_expected.append(expected)
        worst = max(worst, np.abs(scores[row, :visible] - expected).max())
        zero = (dots == 0).all(1)
        assert (scores[row, :visible][zero] == 0).all()
    report(f"layer {layer}: index scores", worst / np.abs(expected).max(), 2e-6)
    return all_expected


def brute_top(scores, count):
    """Indices of the largest finite scores: higher first, then the lower index; ascending."""
    listed = scores.tolist()
    finite = [j for j, score in enumerate(listed) if score > -np.inf]
    return sorted(sorted(finite, key=lambda j: (-listed[j], j))[:count])


def brute_candidates(run, scores, visible):
    """Candidate blocks of one row."""
    size = run.case.candidate_block_size
    num_blocks = -(-visible // size)
    best = np.array(
        [scores[b * size : min((b + 1) * size, visible)].max() for b in range(num_blocks)]
    )
    best[(visible - 1) // size] = np.inf
    return brute_top(best, run.case.topk_blocks)


def selected(run, layer, row):
    indices = run.taps[f"value.layers.{INDEX_SOURCE_OF[layer]}.tap.topk_indices"][row]
    return indices[indices >= 0].tolist()


def inside(run, blocks, scores):
    """Copy scores with -inf outside the candidate blocks."""
    size = run.case.candidate_block_size
    mask = np.zeros(len(scores), bool)
    for block in blocks:
        mask[block * size : (block + 1) * size] = True
    return np.where(mask, scores, -np.inf)


def check_selections_and_candidate_masks(run, exact_scores):
    """From the engine's own scores they must be exact; from float64 scores, equal but for ties."""
    topk, excluded, moved, flips = run.case.index_topk, [], 0, 0
    tapped = run.taps[f"value.layers.{CANDIDATE_LAYER}.tap.candidate_blocks"]
    for row, position in enumerate(run.positions):
        blocks = tapped[row][tapped[row] >= 0].tolist()
        for layer in INDEX_LAYERS:
            visible = (position + 1) // RATIO[layer]
            scores = run.taps[f"value.layers.{layer}.tap.index_scores"][row, :visible].numpy()
            exact = exact_scores[layer][row]
            if layer == CANDIDATE_LAYER:
                assert blocks == brute_candidates(run, scores, visible)
                assert blocks[-1] == (visible - 1) // run.case.candidate_block_size
                flips += blocks != brute_candidates(run, exact, visible)
            made = selected(run, layer, row)
            if layer == READER:
                moved += brute_top(scores, topk) != made
                scores, exact = inside(run, blocks, scores), inside(run, blocks, exact)
                excluded.append(int(np.isneginf(scores).sum()))
            assert len(made) == topk
            assert made == brute_top(scores, topk), (layer, position)
            flips += made != brute_top(exact, topk)
    report("rows that float64 scores select otherwise", flips, 3)
    logger.info("visible entries excluded: %d to %d a row", min(excluded), max(excluded))
    logger.info("selections changed by the exclusion: %d of %d", moved, len(run.positions))
    assert min(excluded) > 0
    assert moved > len(run.positions) / 2


def brute_attention(run, layer, row, entries):
    """Core attention of one row from the cache bytes: one softmax over window and selection."""
    position, window = run.positions[row], run.case.window
    first = max(0, position - window + 1)
    keys = decode(run.window_records[layer][first : position + 1], "fp8_32")
    if RATIO[layer]:
        keys = np.concatenate((keys, entries[selected(run, layer, row)]))
    assert len(keys) == window + (run.case.index_topk if RATIO[layer] else 0)
    query = run.ops["sparse_attention", layer]["query_THD"][row].double().numpy()
    sink = weight(run, f"layers.{layer}.attn.attn_sink")
    logits = query @ keys.T * 64**-0.5
    largest = logits.max(1, keepdims=True)
    power = np.exp(logits - largest)
    total = power.sum(1) + np.exp(sink - largest[:, 0])
    return power @ keys / total[:, None]


def check_attention(run, layer):
    rows = range(len(run.positions))
    entries = None
    if RATIO[layer]:
        entries = entries_of(run, SOURCE_OF[layer], "compressed", "fp4_16")
    core = np.stack([brute_attention(run, layer, row, entries) for row in rows])
    got = run.ops["sparse_attention", layer]["out"].numpy()
    report(f"layer {layer}: core attention", relative(got, core), 1e-5)
    turned = rotate(run, core, run.positions, is_inverse=True, name=rope_name(layer))
    grouped = turned.reshape(len(core), 2, -1)
    prefix = f"layers.{layer}.attn"
    wo_a = weight(run, f"{prefix}.wo_a.weight").reshape(2, 32, -1)
    low_rank = np.einsum("tgk,gnk->tgn", grouped, wo_a).reshape(len(core), -1)
    out = low_rank @ weight(run, f"{prefix}.wo_b.weight").T
    tap = run.taps[f"value.layers.{layer}.tap.attn_out"].numpy()
    report(f"layer {layer}: attention output", relative(tap, out), 2e-5)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(SMALL, id="small"),
        # About three minutes on one core; the limit leaves room for a busy machine.
        pytest.param(LongCase(), id="20480", marks=[pytest.mark.slow, pytest.mark.timeout(1500)]),
    ],
)
def test_long_context(case):
    run = run_long_context(case)
    logger.info(
        "%d tokens in chunks of %d: %.0f s, peak memory %.2f GiB; %d rows from %d on",
        *(case.num_tokens, case.chunk, run.seconds, run.peak_gib),
        *(len(run.positions), run.positions[0]),
    )
    check_queries_and_window_latents(run)
    for layer in SOURCES:
        check_compressed_entries_and_index_keys(run, layer)
    exact_scores = {layer: check_index_scores(run, layer) for layer in INDEX_LAYERS}
    check_selections_and_candidate_masks(run, exact_scores)
    for layer in RATIO:
        check_attention(run, layer)
    assert run.peak_gib < 8
