"""The built-in checkpoint is what its script writes, in the official format, with everything on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import model
from model.checkpoint import Checkpoint
from model.config import ModelConfig
from model.load import load_weights
from model.tokenizer import Tokenizer, engram_token_map
from model.weights import official_tensors
from runtime.config import EngineConfig
from runtime.engine import BUILT_IN_MODEL, Engine, plan_engine
from runtime.metrics import Metrics
from runtime.scoring import score_prompt

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "make_tiny_v41.py"
MAX_BYTES = 4_000_000
PROMPT = (
    "Once upon a time there was a fox that could count: one, two, 3, 4. Was it \u00e9t\u00e9? " * 3
)


def run_python(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )


@pytest.fixture(scope="module")
def config():
    return ModelConfig.from_dir(BUILT_IN_MODEL)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_dir(BUILT_IN_MODEL)


def test_the_script_writes_the_committed_bytes(tmp_path):
    run_python(str(SCRIPT), "--output", str(tmp_path))
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    committed = {path.name: path.read_bytes() for path in BUILT_IN_MODEL.iterdir()}
    assert written.keys() == committed.keys()
    different = [name for name, content in committed.items() if written[name] != content]
    assert different == [], "run examples/make_tiny_v41.py and commit what it writes"


def test_it_is_small():
    assert sum(path.stat().st_size for path in BUILT_IN_MODEL.iterdir()) < MAX_BYTES


def test_it_is_the_official_format(config):
    checkpoint = Checkpoint.open(BUILT_IN_MODEL)
    stored = {name: (tensor.dtype, tensor.shape) for name, tensor in checkpoint.tensors.items()}
    assert stored == official_tensors(config)
    assert len({tensor.file for tensor in checkpoint.tensors.values()}) == 2
    features = checkpoint.validate(config).by_feature
    assert features.keys() == {"text", "draft"}
    assert features["draft"].num_tensors > 0


def test_weights_are_finite_and_scales_vary(config):
    weights = load_weights(Checkpoint.open(BUILT_IN_MODEL), config, dtype_policy="official")
    for name, tensor in weights.items():
        if name.endswith(".scale"):
            assert tensor.min() > 0, name
            assert tensor.max() < 255, name  # NaN
            assert tensor.numel() < 8 or tensor.unique().numel() > 1, name
        else:
            assert tensor.float().isfinite().all(), name
            assert tensor.float().std() > 0, name


def test_every_mechanism_is_on(config):
    text = config.text_config
    ratios = [text.layer_ratio(layer) for layer in range(text.num_hidden_layers)]
    assert set(ratios) == {0, 1, 2}
    assert {ratios[layer] for layer in text.kv_source_layer_ids} == {1, 2}
    assert len(text.kv_source_layer_ids) >= 3
    assert len(text.index_source_layer_ids) > len(text.kv_source_layer_ids)
    assert text.candidate_source_layer_id in text.kv_source_layer_ids
    assert text.candidate_source_layer_id < max(text.index_source_layer_ids)  # somebody reads them
    sharing = [layer for layer, ratio in enumerate(ratios) if ratio and layer not in sources(text)]
    assert {ratios[layer] for layer in sharing} == {1, 2}  # a selection is reused at both ratios
    assert len(text.engram_layer_ids) == 2
    assert max(text.engram_layer_ids) < text.first_ratio_one_layer
    assert (text.hc_mult, text.hc_sinkhorn_iters, text.rms_norm_eps) == (4, 20, 1e-20)
    assert text.rope_scaling is not None
    assert text.rope_scaling.original_max_position_embeddings < text.max_position_embeddings
    assert text.swiglu_limit > 0
    assert text.num_nextn_predict_layers >= 1
    assert config.quantization_config is not None


def sources(text):
    return {*text.kv_source_layer_ids, *text.index_source_layer_ids}


def test_candidates_bind_early_and_never_run_short(config):
    text = config.text_config
    entries = text.candidate_topk_blocks * text.candidate_block_size
    assert entries >= text.index_topk + text.candidate_block_size - 1
    assert entries <= 128


@pytest.mark.parametrize(
    "text",
    [
        "The quick brown fox jumps over the lazy dog.",
        "  two  spaces,\ttabs\n\n    and lines\r\n",
        "d\u00e9j\u00e0 vu, na\u00efve \u0141\u00f3d\u017a, Stra\u00dfe, S\u00e3o Paulo",
        "\U0001f98a\U0001f680 emoji \U0001f469\u200d\U0001f4bb",
        "\u4f60\u597d, \u041f\u0440\u0438\u0432\u0435\u0442",
        "def f(x):\n    return {'a': x ** 2, 'b': 1_000_000}",
        "12345 6 78.90 \u00bd",
        "\x00\x7f\ufeff\u200b",
    ],
)
def test_texts_survive_the_tokenizer(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids[0] == 0
    assert tokenizer.decode(ids) == text


def test_it_was_trained(tokenizer):
    text = "Once upon a time there was a small lighthouse at the end of a long stone wall."
    assert len(tokenizer.encode(text)) < len(text) / 2


def test_special_tokens_have_their_ids(config, tokenizer):
    names = [tokenizer.raw_token(token_id) for token_id in (0, 1, 2)]
    assert names == ["<|bos|>", "<|eos|>", "<|pad|>"]
    assert tokenizer.raw_token(config.image_token_id) == "<|image|>"
    assert tokenizer.raw_token(config.text_config.dspark_noise_token_id) == "<|noise|>"
    assert tokenizer.decode([0, 1, 2, config.image_token_id]) == ""


def test_the_engram_keeps_the_first_ids_and_joins_others(config, tokenizer):
    token_map = engram_token_map(tokenizer, config)
    assert token_map[:3].tolist() == [0, 1, 2]
    assert token_map.unique().numel() == config.text_config.engram_compressed_vocab_size
    assert config.text_config.engram_compressed_vocab_size < tokenizer.vocab_size


def test_logits_are_spread_and_varied():
    settings = EngineConfig(max_model_len=256, max_num_seqs=1, max_num_batched_tokens=128)
    engine = Engine(plan_engine(settings), Metrics())
    ids = engine.tokenizer.encode(PROMPT)[:96]
    logits = score_prompt(engine, ids).logits
    assert logits.isfinite().all()
    assert 2.0 < logits.std(-1).mean() < 4.0
    assert logits.argmax(-1).unique().numel() > len(set(ids)) // 2
    assert 0.1 < torch.softmax(logits, -1).amax(-1).mean() < 0.9


def test_public_names_exist():
    assert [name for name in model.__all__ if not hasattr(model, name)] == []
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        model.missing  # noqa: B018 - the access is what is tested


def test_importing_the_package_is_light():
    code = "import sys, model; sys.exit('torch' in sys.modules or 'tokenizers' in sys.modules)"
    run_python("-c", code)
