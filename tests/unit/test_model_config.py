"""config.json: what loads, and one wrong file for each error."""

import dataclasses
import json
import re

import pytest

from model import errors
from model.config import ModelConfig, RopeScaling, TextConfig
from model.config_reader import IGNORED_KEYS
from tests.helpers.goldens import CASES, golden_dir, golden_json
from tests.helpers.production import production_config


def text_config(**changes):
    raw = golden_json("text-fp32")
    raw["text_config"] |= changes
    return raw


def draft_config(**changes):
    raw = golden_json("dspark")
    raw["text_config"] |= changes
    return raw


def refuse(raw, error, *parts):
    """Check that a config is refused with this error, and that its message holds the parts."""
    with pytest.raises(error) as caught:
        ModelConfig.from_dict(raw, source="some/config.json")
    assert type(caught.value) is error
    message = str(caught.value)
    for part in (error.__name__, "some/config.json", *parts):
        assert part in message, f"{part!r} not in {message!r}"


@pytest.mark.parametrize("case", CASES)
def test_golden_configs_load_with_every_key(case):
    config = ModelConfig.from_dir(golden_dir(case))
    raw = golden_json(case)
    for key, value in raw["text_config"].items():
        if key in IGNORED_KEYS or key == "rope_scaling":
            continue
        read = getattr(config.text_config, key)
        assert (list(read) if isinstance(read, tuple) else read) == value, key
    assert config.text_config.rope_scaling == RopeScaling(
        rope_type="yarn",
        factor=16.0,
        beta_fast=8.0,
        beta_slow=1.0,
        original_max_position_embeddings=256,
    )
    assert (config.vision_config is not None) == (case == "vision")
    assert (config.quantization_config is not None) == (case in ("text-quant", "dspark"))
    if config.vision_config is not None:
        for key, value in raw["vision_config"].items():
            assert getattr(config.vision_config, key) == value, key


def test_production_layers_share_sources():
    text = ModelConfig.from_dict(production_config()).text_config
    kv = {**dict.fromkeys(range(2, 8), 2), **dict.fromkeys(range(8, 14), 8)}
    kv |= {**dict.fromkeys(range(14, 20), 14), **dict.fromkeys(range(20, 40), 20)}
    index = {layer: source for layer, source in kv.items() if layer < 20}
    index |= {layer: 4 * (layer // 4) for layer in range(20, 40)}
    for layer in range(43):
        assert text.kv_source(layer) == kv.get(layer), layer
        assert text.index_source(layer) == index.get(layer), layer
    ratios = [text.layer_ratio(layer) for layer in range(43)]
    assert ratios == [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3
    assert text.num_engram_columns == 24
    assert text.first_ratio_one_layer == 20


def test_bare_ratios_of_the_decoder_are_enough():
    raw = production_config()
    raw["text_config"]["compress_ratios"] = raw["text_config"]["compress_ratios"][:40]
    assert ModelConfig.from_dict(raw).text_config.layer_ratio(41) == 0


def test_config_is_hashable_and_frozen():
    config = ModelConfig.from_dict(production_config())
    assert hash(config) == hash(ModelConfig.from_dict(production_config()))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.bos_token_id = 5


def test_null_options():
    raw = text_config(rope_scaling=None, candidate_source_layer_id=None)
    raw |= {"vision_config": None, "quantization_config": None}
    config = ModelConfig.from_dict(raw)
    assert config.text_config.rope_scaling is None
    assert config.text_config.candidate_source_layer_id == -1
    assert config.vision_config is None


def test_engram_and_draft_can_be_off():
    raw = text_config(engram_layer_ids=[], engram_num_embeddings=[], engram_vocab_size=0)
    raw["text_config"] |= {"engram_max_ngram_size": 0, "engram_n_heads": 0, "engram_head_dim": 0}
    assert ModelConfig.from_dict(raw).text_config.engram_layer_ids == ()


@pytest.mark.parametrize("key", sorted(IGNORED_KEYS))
def test_keys_without_meaning_pass(key):
    raw = text_config(**{key: "anything"})
    raw[key] = ["anything"]
    assert ModelConfig.from_dict(raw) == ModelConfig.from_dict(text_config())


def test_switches_of_other_engines_pass_at_their_value():
    switches = {
        "hc_shifted": True,
        "dspark_target_attn_input": True,
        "use_fp4_sparse_kv": True,
        "gate_temp": 1,
        "index_k_source_layer_ids": [2, 4, 5],
    }
    assert ModelConfig.from_dict(text_config(**switches)) == ModelConfig.from_dict(text_config())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hc_shifted", False),
        ("hc_shifted", 1),
        ("dspark_target_attn_input", False),
        ("use_fp4_sparse_kv", False),
        ("gate_temp", 0.5),
        ("index_k_source_layer_ids", [2, 4]),
    ],
)
def test_switches_of_other_engines_are_refused_otherwise(key, value):
    raw = text_config(**{key: value})
    refuse(raw, errors.UnsupportedConfigValue, f"text_config.{key}", json.dumps(value))


@pytest.mark.parametrize(
    ("case", "path", "key", "nearest"),
    [
        ("text-fp32", (), "bos_token", "bos_token_id"),
        ("text-fp32", ("text_config",), "engram_pad_id", "engram_pad_token_id"),
        ("text-fp32", ("text_config",), "num_experts_per_token", "num_experts_per_tok"),
        ("text-fp32", ("text_config", "rope_scaling"), "beta_fats", "beta_fast"),
        ("text-quant", ("quantization_config",), "scale_format", "scale_fmt"),
        ("vision", ("vision_config",), "patch_sise", "patch_size"),
        ("text-fp32", ("text_config",), "zzzz", "none"),
    ],
)
def test_unknown_key_names_the_nearest(case, path, key, nearest):
    raw = golden_json(case)
    target = raw
    for part in path:
        target = target[part]
    target[key] = 1
    refuse(raw, errors.UnknownConfigKey, f"'{key}'", nearest, ".".join(path))


def test_several_unknown_keys_are_named_together():
    raw = text_config(window_size=3, norm_eps=1e-6)
    refuse(raw, errors.UnknownConfigKey, "'window_size'", "'norm_eps'")


REQUIRED = [
    f.name
    for f in dataclasses.fields(TextConfig)
    if f.default is dataclasses.MISSING and f.name != "model_type"
]


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_text_key(key):
    raw = text_config()
    del raw["text_config"][key]
    refuse(raw, errors.MissingConfigKey, f"'{key}'", "text_config")


def test_what_decides_the_forward_is_required():
    assert len(REQUIRED) == 41
    for key in ("rms_norm_eps", "rope_scaling", "hc_eps", "swiglu_limit", "compress_ratios"):
        assert key in REQUIRED


@pytest.mark.parametrize("key", ["architectures", "model_type", "eos_token_id", "text_config"])
def test_missing_root_key(key):
    raw = golden_json("text-fp32")
    del raw[key]
    refuse(raw, errors.MissingConfigKey, f"'{key}'")


@pytest.mark.parametrize(
    ("changes", "key", "expected", "got"),
    [
        ({"hidden_size": True}, "hidden_size", "an integer", "true"),
        ({"hidden_size": 96.0}, "hidden_size", "an integer", "96.0"),
        ({"hidden_size": "96"}, "hidden_size", "an integer", '"96"'),
        ({"hidden_size": None}, "hidden_size", "an integer", "null"),
        ({"hc_eps": "1e-6"}, "hc_eps", "a number", '"1e-6"'),
        ({"hc_eps": False}, "hc_eps", "a number", "false"),
        ({"norm_topk_prob": 1}, "norm_topk_prob", "true or false", "1"),
        ({"scoring_func": 3}, "scoring_func", "a string", "3"),
        ({"compress_ratios": 2}, "compress_ratios", "a list of integers", "2"),
        ({"kv_source_layer_ids": [2, 4, 5.0]}, "kv_source_layer_ids[2]", "an integer", "5.0"),
        ({"kv_source_layer_ids": [2, True]}, "kv_source_layer_ids[1]", "an integer", "true"),
        ({"rope_scaling": "yarn"}, "rope_scaling", "an object", '"yarn"'),
    ],
)
def test_wrong_type(changes, key, expected, got):
    refuse(text_config(**changes), errors.WrongConfigType, f"text_config.{key}", expected, got)


def test_wrong_type_of_objects():
    refuse([], errors.WrongConfigType, "an object", "[]")
    raw = golden_json("text-fp32") | {"text_config": None}
    refuse(raw, errors.WrongConfigType, "text_config", "null")
    raw = golden_json("text-fp32") | {"architectures": ["DeepseekV41ForCausalLM", 1]}
    refuse(raw, errors.WrongConfigType, "architectures[1]", "a string")


@pytest.mark.parametrize(
    ("changes", "key", "expected"),
    [
        ({"hidden_act": "gelu"}, "hidden_act", '"silu"'),
        ({"num_key_value_heads": 2}, "num_key_value_heads", "1"),
        ({"n_shared_experts": 2}, "n_shared_experts", "1"),
        ({"scoring_func": "sigmoid"}, "scoring_func", '"sqrtsoftplus"'),
        ({"topk_method": "greedy"}, "topk_method", '"noaux_tc"'),
        ({"norm_topk_prob": False}, "norm_topk_prob", "true"),
        ({"attention_bias": True}, "attention_bias", "false"),
        ({"attention_dropout": 0.1}, "attention_dropout", "0.0"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings", "false"),
        ({"model_type": "deepseek_v4"}, "model_type", '"deepseek_v41_text"'),
        ({"hidden_size": 0}, "hidden_size", "at least 1"),
        ({"index_topk": 2**31}, "index_topk", "at most 2147483647"),
        (
            {"engram_n_heads": 10**9},
            "engram_n_heads",
            "at most 256",
        ),  # would search primes for days
        ({"rms_norm_eps": 0.0}, "rms_norm_eps", "above 0"),
        ({"rope_theta": float("inf")}, "rope_theta", "a finite number"),
        ({"engram_layer_ids": [-1, 4]}, "engram_layer_ids[0]", "at least 0"),
        ({"compress_ratios": [0, 0, 3] + [2] * 7}, "compress_ratios[2]", "0, 1 or 2"),
    ],
)
def test_unsupported_text_value(changes, key, expected):
    raw = text_config(**changes)
    refuse(raw, errors.UnsupportedConfigValue, f"text_config.{key}", expected)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("architectures", ["DeepseekV4ForCausalLM"], "DeepseekV41ForCausalLM"),
        ("architectures", ["DeepseekV41ForCausalLM"] * 2, "DeepseekV41ForCausalLM"),
        ("model_type", "deepseek_v4", "deepseek_v41"),
        ("dtype", "float16", '"bfloat16" or "float32"'),
        ("tie_word_embeddings", True, "false"),
        ("quantization_config.quant_method", "awq", '"fp8"'),
        ("quantization_config.weight_block_size", [128, 128], "[32, 32]"),
        ("quantization_config.scale_fmt", "float", '"ue8m0"'),
        ("quantization_config.expert_dtype", "fp8", '"fp4"'),
        ("text_config.rope_scaling.rope_type", "linear", '"yarn"'),
        ("text_config.rope_scaling.type", "linear", '"yarn"'),
        ("text_config.rope_scaling.factor", 0, "above 0"),
    ],
)
def test_unsupported_value_elsewhere(path, value, expected):
    raw = golden_json("text-quant")
    *parents, key = path.split(".")
    target = raw
    for part in parents:
        target = target[part]
    target[key] = value
    refuse(raw, errors.UnsupportedConfigValue, path, expected)


@pytest.mark.parametrize(
    ("changes", "key", "expected"),
    [
        ({"num_attention_heads": 3}, "num_attention_heads", "a multiple of o_groups = 2"),
        ({"hidden_size": 100}, "hidden_size", "a multiple of 32"),
        ({"head_dim": 48}, "head_dim", "a multiple of 32"),
        ({"index_head_dim": 48}, "index_head_dim", "a multiple of 32"),
        ({"engram_head_dim": 16}, "engram_head_dim", "a multiple of 32"),
        ({"moe_intermediate_size": 40}, "moe_intermediate_size", "a multiple of 32"),
        ({"o_lora_rank": 24}, "o_groups * o_lora_rank", "a multiple of 32"),
        ({"qk_rope_head_dim": 64}, "qk_rope_head_dim", "index_head_dim) = 32"),
        ({"qk_rope_head_dim": 31}, "qk_rope_head_dim", "even"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok", "n_routed_experts = 6"),
        ({"swiglu_limit": -1.0}, "swiglu_limit", "0 or above"),
        ({"engram_pad_token_id": 384}, "engram_pad_token_id", "vocab_size = 384"),
        ({"kv_source_layer_ids": [4, 2, 5]}, "kv_source_layer_ids", "ascending"),
        ({"index_source_layer_ids": [2, 2, 4, 5]}, "index_source_layer_ids", "ascending"),
        ({"kv_source_layer_ids": [2, 4, 5, 10]}, "kv_source_layer_ids", "below num_hidden_layers"),
        ({"engram_layer_ids": [1]}, "engram_num_embeddings", "one entry for each"),
        ({"engram_vocab_size": 1}, "engram_vocab_size", "at least 2"),
        ({"engram_max_ngram_size": 1}, "engram_max_ngram_size", "at least 2"),
    ],
)
def test_incompatible_sizes(changes, key, expected):
    refuse(text_config(**changes), errors.IncompatibleSizes, f"text_config.{key}", expected)


def test_incompatible_ids_and_vision():
    raw = golden_json("text-fp32") | {"bos_token_id": 384}
    refuse(raw, errors.IncompatibleSizes, "bos_token_id = 384", "vocab_size = 384")
    raw = golden_json("vision")
    raw["vision_config"]["num_attention_heads"] = 3
    refuse(raw, errors.IncompatibleSizes, "vision_config.hidden_size", "3 heads")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"dspark_block_size": 0}, "dspark_block_size"),
        ({"dspark_markov_rank": 0}, "dspark_markov_rank"),
        ({"dspark_num_experts_per_tok": 5}, "dspark_num_experts_per_tok"),
        ({"dspark_target_layer_ids": []}, "dspark_target_layer_ids"),
        ({"dspark_target_layer_ids": [2, 2]}, "dspark_target_layer_ids"),
        ({"dspark_target_layer_ids": [2, 6]}, "dspark_target_layer_ids"),
        ({"dspark_noise_token_id": 384}, "dspark_noise_token_id"),
    ],
)
def test_draft_fields_are_checked(changes, key):
    refuse(draft_config(**changes), errors.IncompatibleSizes, f"text_config.{key}")


RATIOS = [0, 0, 2, 2, 2, 1, 1, 1, 1, 1]
LOAD_RULES = [
    (
        errors.CompressRatiosLength,
        {"compress_ratios": [*RATIOS, 0]},
        ("rule 1", "expected 10", "11"),
    ),
    (
        errors.SourceWithoutRatio,
        {"kv_source_layer_ids": [1, 2, 4, 5], "index_source_layer_ids": [1, 2, 4, 5, 7, 9]},
        ("rule 2", "kv_source_layer_ids names layer 1"),
    ),
    (
        errors.SourceWithoutRatio,
        {"index_source_layer_ids": [0, 2, 4, 5, 7, 9]},
        ("rule 2", "index_source_layer_ids names layer 0"),
    ),
    (
        errors.LayerWithoutSource,
        {"compress_ratios": [0, 2, *RATIOS[2:]]},
        ("rule 2", "layer 1", "kv_source_layer_ids", "[2, 4, 5]"),
    ),
    (
        errors.LayerWithoutSource,
        {"index_source_layer_ids": [4, 5, 7, 9]},
        ("rule 2", "layer 2", "index_source_layer_ids", "[4, 5, 7, 9]"),
    ),
    (
        errors.KvSourceWithoutIndexer,
        {"index_source_layer_ids": [2, 5, 7, 9]},
        ("rule 3", "layer 4", "[2, 5, 7, 9]"),
    ),
    (
        errors.SegmentRatioMismatch,
        {"compress_ratios": [0, 0, 2, 1, 2, 1, 1, 1, 1, 1], "engram_layer_ids": [0, 1]},
        ("rule 3", "compress_ratios[3]", "expected 2", "layer 2", "got 1"),
    ),
    (
        errors.SegmentRatioMismatch,
        {"compress_ratios": [*RATIOS[:8], 0, 1]},
        ("rule 3", "compress_ratios[8]", "expected 1", "got 0"),
    ),
    (
        errors.EngramLayerTooHigh,
        {"engram_layer_ids": [1, 5]},
        ("rule 4", "names layer 5", "below 5"),
    ),
    (
        errors.CandidateSourceNotIndexed,
        {"candidate_source_layer_id": 6},
        ("rule 5", "[2, 4, 5, 7, 9]", "got 6"),
    ),
    (
        errors.CandidateRatioMismatch,
        {"candidate_source_layer_id": 4},
        ("rule 5", "layer 5", "of layer 4", "expected the same compress_ratios 2", "got 1"),
    ),
    (
        errors.TooFewCandidates,
        {"index_topk": 17},
        ("rule 6", "= 16", "index_topk = 17"),
    ),
    (
        errors.EngramRowsMismatch,
        {"engram_num_embeddings": [434, 607]},
        ("rule 8", "[1]", "layer 4", "606", "607"),
    ),
    (
        errors.EngramRowsMismatch,
        {"engram_vocab_size": 62},
        ("rule 8", "[0]", "layer 1", "got 434"),
    ),
]


@pytest.mark.parametrize(("error", "changes", "parts"), LOAD_RULES)
def test_load_rule(error, changes, parts):
    assert issubclass(error, errors.LoadRuleError)
    refuse(text_config(**changes), error, *parts)


def test_load_rule_1_for_draft_layers():
    ratios = [0, 2, 2, 1, 1, 1]
    refuse(
        draft_config(compress_ratios=[*ratios, 0, 1, 0]),
        errors.DraftRatioNotZero,
        "rule 1",
        "compress_ratios[7]",
        "got 1",
    )
    refuse(
        draft_config(compress_ratios=[*ratios, 0]),
        errors.CompressRatiosLength,
        "expected 6 or 9 entries, got 7",
    )


def test_each_load_rule_error_has_a_test():
    tested = {error for error, _, _ in LOAD_RULES} | {errors.DraftRatioNotZero}
    assert tested == set(errors.LoadRuleError.__subclasses__())


def test_candidate_limit_is_inclusive():
    text = ModelConfig.from_dict(text_config(index_topk=16)).text_config
    assert text.index_topk == 16


def test_feature_and_kernel_rules_do_not_refuse():
    # Draft targets on both sides of the split, blocks of 4 entries, 6 experts: no load rules.
    text = ModelConfig.from_dict(golden_json("dspark")).text_config
    split = text.first_ratio_one_layer
    assert {layer < split for layer in text.dspark_target_layer_ids} == {True, False}
    assert text.candidate_block_size == 4
    assert text.n_routed_experts % 4 != 0


def test_window_only_model_loads():
    raw = text_config(
        compress_ratios=[0] * 10,
        kv_source_layer_ids=[],
        index_source_layer_ids=[],
        candidate_source_layer_id=-1,
        candidate_topk_blocks=0,
    )
    assert ModelConfig.from_dict(raw).text_config.kv_source(9) is None


@pytest.mark.parametrize(
    ("content", "error", "part"),
    [
        (None, errors.ConfigNotFound, "No such file"),
        (b"{", errors.ConfigSyntax, "line 1"),
        (b"[1, 2]", errors.ConfigSyntax, "it holds [1, 2]"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', errors.ConfigSyntax, "key 'c' appears twice"),
        (b'{"a": "\xff"}', errors.ConfigSyntax, "not UTF-8 at byte 7"),
    ],
)
def test_unreadable_file(tmp_path, content, error, part):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(error, match=re.escape(part)) as caught:
        ModelConfig.from_dir(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)
