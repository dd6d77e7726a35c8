"""Rules between config fields that refuse a checkpoint, each with its own error class.

Rules that concern a feature (bounded replay, where the draft targets lie) or a kernel (page and
block sizes) belong to that feature or kernel and are not here.
"""

from typing import TYPE_CHECKING

from model.engram_hash import hash_primes
from model.errors import (
    CandidateRatioMismatch,
    CandidateSourceNotIndexed,
    CompressRatiosLength,
    DraftRatioNotZero,
    EngramLayerTooHigh,
    EngramRowsMismatch,
    IncompatibleSizes,
    KvSourceWithoutIndexer,
    LayerWithoutSource,
    SegmentRatioMismatch,
    SourceWithoutRatio,
    TooFewCandidates,
    UnsupportedConfigValue,
)

if TYPE_CHECKING:
    from model.config import ModelConfig, TextConfig, VisionConfig

QUANT_GROUP = 32  # channels that share a scale, in weights and activations alike


def check_config(config: "ModelConfig", source: str) -> None:
    """Check sizes, ids and the load rules of a config.

    Args:
        config: the config, its fields already checked one by one.
        source: file name for messages.
    Raises:
        IncompatibleSizes, UnsupportedConfigValue: single fields or pairs of sizes.
        LoadRuleError: a subclass for each rule.
    """
    text = config.text_config
    _check_sizes(text, source)
    _check_token_ids(config, source)
    if config.vision_config is not None:
        _check_vision(config.vision_config, source)
    _check_ratios(text, source)
    _check_sources(text, source)
    _check_candidates(text, source)
    if text.engram_layer_ids or text.engram_num_embeddings:
        _check_engram(text, source)
    if text.num_nextn_predict_layers > 0:
        _check_draft(text, source)


def _require(is_valid: bool, source: str, key: str, got: object, expected: str) -> None:
    if not is_valid:
        raise IncompatibleSizes(source=source, key=key, got=got, expected=expected)


def _check_sizes(text: "TextConfig", source: str) -> None:
    _require(
        text.num_attention_heads % text.o_groups == 0,
        source,
        "text_config.num_attention_heads",
        text.num_attention_heads,
        f"a multiple of o_groups = {text.o_groups}",
    )
    grouped = {  # every dimension that a quantised linear or a fake quantiser walks in groups
        "hidden_size": text.hidden_size,
        "head_dim": text.head_dim,
        "index_head_dim": text.index_head_dim,
        "q_lora_rank": text.q_lora_rank,
        "moe_intermediate_size": text.moe_intermediate_size,
        "o_groups * o_lora_rank": text.o_groups * text.o_lora_rank,
        "num_attention_heads * head_dim / o_groups": text.num_attention_heads
        * text.head_dim
        // text.o_groups,
    }
    if text.engram_layer_ids:
        grouped["engram_head_dim"] = text.engram_head_dim
    for key, size in grouped.items():
        is_valid = size > 0 and size % QUANT_GROUP == 0
        _require(is_valid, source, f"text_config.{key}", size, f"a multiple of {QUANT_GROUP}")
    rope = text.qk_rope_head_dim
    limit = min(text.head_dim, text.index_head_dim)
    expected = f"even and at most min(head_dim, index_head_dim) = {limit}"
    _require(
        rope % 2 == 0 and rope <= limit, source, "text_config.qk_rope_head_dim", rope, expected
    )
    key, expected = (
        "text_config.num_experts_per_tok",
        f"at most n_routed_experts = {text.n_routed_experts}",
    )
    _require(
        text.num_experts_per_tok <= text.n_routed_experts,
        source,
        key,
        text.num_experts_per_tok,
        expected,
    )
    _require(
        text.swiglu_limit >= 0, source, "text_config.swiglu_limit", text.swiglu_limit, "0 or above"
    )


def _check_token_ids(config: "ModelConfig", source: str) -> None:
    text = config.text_config
    ids = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "image_token_id": config.image_token_id,
        "text_config.engram_pad_token_id": text.engram_pad_token_id,
        "text_config.dspark_noise_token_id": text.dspark_noise_token_id,
    }
    for key, token_id in ids.items():
        expected = f"below vocab_size = {text.vocab_size}"
        _require(token_id < text.vocab_size, source, key, token_id, expected)


def _check_vision(vision: "VisionConfig", source: str) -> None:
    head_dim, rest = divmod(vision.hidden_size, vision.num_attention_heads)
    expected = f"num_attention_heads = {vision.num_attention_heads} heads of a multiple of 4"
    _require(
        rest == 0 and head_dim % 4 == 0,
        source,
        "vision_config.hidden_size",
        vision.hidden_size,
        expected,
    )


def _check_ratios(text: "TextConfig", source: str) -> None:
    layers, draft = text.num_hidden_layers, text.num_nextn_predict_layers
    ratios = text.compress_ratios
    if len(ratios) not in (layers, layers + draft):
        expected = f"{layers}" if draft == 0 else f"{layers} or {layers + draft}"
        raise CompressRatiosLength(
            source=source, expected=expected, got=len(ratios), layers=layers, draft=draft
        )
    for index, ratio in enumerate(ratios):
        if ratio not in (0, 1, 2):
            raise UnsupportedConfigValue(
                source=source,
                key=f"text_config.compress_ratios[{index}]",
                expected="0, 1 or 2",
                got=ratio,
                hint="No compressor for other ratios exists in this architecture.",
            )
        if index >= layers and ratio != 0:
            raise DraftRatioNotZero(source=source, index=index, got=ratio)


def _check_layer_ids(ids: tuple[int, ...], key: str, text: "TextConfig", source: str) -> None:
    is_valid = all(0 <= layer < text.num_hidden_layers for layer in ids)
    is_valid = is_valid and all(low < high for low, high in zip(ids, ids[1:], strict=False))
    expected = f"ascending layer ids below num_hidden_layers = {text.num_hidden_layers}"
    _require(is_valid, source, f"text_config.{key}", list(ids), expected)


def _check_sources(text: "TextConfig", source: str) -> None:
    kinds = {
        "kv_source_layer_ids": text.kv_source_layer_ids,
        "index_source_layer_ids": text.index_source_layer_ids,
    }
    for key, ids in kinds.items():
        _check_layer_ids(ids, key, text, source)
        for layer in ids:
            if text.layer_ratio(layer) == 0:
                raise SourceWithoutRatio(source=source, key=key, layer=layer)
        for layer in range(text.num_hidden_layers):
            ratio = text.layer_ratio(layer)
            if ratio > 0 and (not ids or layer < ids[0]):
                raise LayerWithoutSource(
                    source=source, layer=layer, ratio=ratio, key=key, got=list(ids)
                )
    for layer in text.kv_source_layer_ids:
        if layer not in text.index_source_layer_ids:
            raise KvSourceWithoutIndexer(
                source=source, layer=layer, got=list(text.index_source_layer_ids)
            )
    # As kv sources are index sources, no index segment can cross a kv segment; only the ratios
    # remain to check.
    bounds = (*text.kv_source_layer_ids, text.num_hidden_layers)
    for start, end in zip(bounds, bounds[1:], strict=False):
        for layer in range(start, end):
            ratio, expected = text.layer_ratio(layer), text.layer_ratio(start)
            if ratio != expected:
                raise SegmentRatioMismatch(
                    source=source, layer=layer, kv_source=start, expected=expected, got=ratio
                )


def _check_candidates(text: "TextConfig", source: str) -> None:
    candidate = text.candidate_source_layer_id
    if candidate < 0:
        return
    if candidate not in text.index_source_layer_ids:
        expected = list(text.index_source_layer_ids)
        raise CandidateSourceNotIndexed(source=source, expected=expected, got=candidate)
    ratio = text.layer_ratio(candidate)
    for layer in text.index_source_layer_ids:
        if layer > candidate and text.layer_ratio(layer) != ratio:
            raise CandidateRatioMismatch(
                source=source,
                layer=layer,
                candidate_source=candidate,
                expected=ratio,
                got=text.layer_ratio(layer),
            )
    entries = text.candidate_topk_blocks * text.candidate_block_size
    if entries < text.index_topk:
        raise TooFewCandidates(source=source, got=entries, expected=text.index_topk)


def _check_engram(text: "TextConfig", source: str) -> None:
    ids, rows = text.engram_layer_ids, text.engram_num_embeddings
    _check_layer_ids(ids, "engram_layer_ids", text, source)
    key, expected = (
        "text_config.engram_num_embeddings",
        f"one entry for each of engram_layer_ids {list(ids)}",
    )
    _require(len(rows) == len(ids), source, key, list(rows), expected)
    least = {
        "engram_vocab_size": (text.engram_vocab_size, 2),
        "engram_max_ngram_size": (text.engram_max_ngram_size, 2),
        "engram_n_heads": (text.engram_n_heads, 1),
        "engram_compressed_vocab_size": (text.engram_compressed_vocab_size, 1),
    }
    for name, (value, minimum) in least.items():
        _require(value >= minimum, source, f"text_config.{name}", value, f"at least {minimum}")
    limit = text.first_ratio_one_layer
    for layer in ids:
        if limit is not None and layer >= limit:
            raise EngramLayerTooHigh(source=source, layer=layer, limit=limit)
    primes = hash_primes(
        len(ids), text.engram_vocab_size, text.engram_max_ngram_size, text.engram_n_heads
    )
    for index, layer in enumerate(ids):
        total = sum(sum(heads) for heads in primes[index])
        if rows[index] != total:
            raise EngramRowsMismatch(
                source=source, index=index, layer=layer, expected=total, got=rows[index]
            )


def _check_draft(text: "TextConfig", source: str) -> None:
    positive = {
        "dspark_block_size": text.dspark_block_size,
        "dspark_markov_rank": text.dspark_markov_rank,
        "dspark_n_routed_experts": text.dspark_n_routed_experts,
        "dspark_num_experts_per_tok": text.dspark_num_experts_per_tok,
    }
    for key, value in positive.items():
        _require(value > 0, source, f"text_config.{key}", value, "at least 1 with draft blocks")
    experts, chosen = text.dspark_n_routed_experts, text.dspark_num_experts_per_tok
    key, expected = (
        "text_config.dspark_num_experts_per_tok",
        f"at most dspark_n_routed_experts = {experts}",
    )
    _require(chosen <= experts, source, key, chosen, expected)
    targets = text.dspark_target_layer_ids
    is_valid = len(targets) > 0 and len(set(targets)) == len(targets)
    is_valid = is_valid and all(layer < text.num_hidden_layers for layer in targets)
    expected = f"distinct layer ids below num_hidden_layers = {text.num_hidden_layers}"
    _require(is_valid, source, "text_config.dspark_target_layer_ids", list(targets), expected)
