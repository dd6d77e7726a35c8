"""Families: which functions a step is made of, and what their local names are bound to.

This is the only place that knows both the layer list and the names of weights, caches and step
inputs.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from graphs.bucket import BucketKey, Variant
from graphs.config import CompileConfig
from graphs.ops.quant import record_bytes
from graphs.static_io import STEP_INPUTS
from graphs.tracing import FamilyFunction, TensorSpec
from model.config import ModelConfig, TextConfig
from model.engram_hash import engram_constants
from model.layer import LayerSpec, layer_specs
from model.rope import rope_constants
from model.scope import Scope
from model.transformer import (
    block,
    prologue,
    sample_all_epilogue,
    sample_epilogue,
    sample_prompt_epilogue,
    score_epilogue,
)

BACKTRACK = 6  # positions a request may be rewound: five drafts and one (model.md 9.3)


@dataclass(frozen=True, slots=True)
class StateShape:
    """Sizes of the per-request state.

    Args:
        num_slots: requests plus the reserved slot 0.
        num_blocks: cache blocks, the reserved block 0 included.
        block_size: tokens per block; divisible by every ratio.
        max_blocks: blocks a request can have: width of the block table.
    """

    num_slots: int
    num_blocks: int
    block_size: int
    max_blocks: int


def cache_specs(
    config: TextConfig, compile_config: CompileConfig, state: StateShape
) -> dict[str, TensorSpec]:
    """Return the spec of every state tensor by global name (model.md 9.1).

    Rings: cache.layers.L.window, cache.layers.L.raw, cache.history. Blocks:
        cache.layers.L.compressed,
    cache.layers.L.index_key, cache.tokens (token ids, for penalties). Also cache.block_table.
    """
    dtype = compile_config.act_dtype

    def entry(dim: int, fmt: str) -> tuple[int, torch.dtype]:
        return (record_bytes(dim, fmt), torch.uint8) if compile_config.cache_quant else (dim, dtype)

    slots = state.num_slots
    specs = {
        "cache.block_table": TensorSpec((slots, state.max_blocks), torch.int32),
        "cache.tokens": TensorSpec((state.num_blocks, state.block_size), torch.int32),
    }
    width, kind = entry(config.head_dim, "fp8_32")
    for layer in range(config.num_hidden_layers):
        ring = (slots, config.sliding_window + BACKTRACK, width)
        specs[f"cache.layers.{layer}.window"] = TensorSpec(ring, kind)
    for layer in config.kv_source_layer_ids:
        ratio = config.layer_ratio(layer)
        blocks = (state.num_blocks, state.block_size // ratio)
        for name, dim, fmt in (
            ("compressed", config.head_dim, "fp4_16"),
            ("index_key", config.index_head_dim, "fp4_32"),
        ):
            size, kind = entry(dim, fmt)
            specs[f"cache.layers.{layer}.{name}"] = TensorSpec((*blocks, size), kind)
        if ratio > 1:
            raw = (slots, ratio + BACKTRACK - 1, 2 * config.head_dim)
            specs[f"cache.layers.{layer}.raw"] = TensorSpec(raw, torch.float32)
    if config.engram_layer_ids:
        history = (slots, config.engram_max_ngram_size - 1 + BACKTRACK)
        specs["cache.history"] = TensorSpec(history, torch.int32)
    return specs


def constants(config: ModelConfig, token_map: Tensor | None) -> dict[str, Tensor]:
    """Return the constant inputs by global name.

    Args:
        config: the model.
        token_map: compressed id of every token, int32 [vocab]; needed where the model has Engram
            layers.
    """
    text = config.text_config
    made = {f"const.inv_freq.{name}": value for name, value in rope_constants(text).items()}
    if text.engram_layer_ids and token_map is not None:
        hashing = engram_constants(config)
        made |= {
            "const.engram.token_map": token_map,
            "const.engram.pad": token_map[text.engram_pad_token_id].long().clone(),
        }
        for name in ("multipliers", "primes", "offsets"):
            for index, value in enumerate(getattr(hashing, name)):
                made[f"const.engram.{name}.{index}"] = value.clone()
    return made


@dataclass(frozen=True, slots=True)
class FamilyCall:
    """One call of a family in the step.

    Args:
        label: where in the model, for example "layers.3".
        family: name shared by all calls that may share a graph.
        function: named tensors -> named tensors.
        bind: local name -> global name.
        publish: local output name -> global value name.
    """

    label: str
    family: str
    function: FamilyFunction
    bind: Callable[[str], str]
    publish: Callable[[str], str]


@dataclass(slots=True)
class _Environment:
    """Current global name of every activation, as the layer list is walked."""

    values: dict[str, str] = field(default_factory=dict)

    def publish(self, label: str, name: str) -> str:
        self.values[name] = f"value.{label}.{name}"
        return self.values[name]


def _family_function(
    body: Callable[[Scope], dict[str, Tensor]],
    config: TextConfig,
    compile_config: CompileConfig,
    with_taps: bool,
) -> FamilyFunction:
    def run(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        taps: dict[str, Tensor] | None = {} if with_taps else None
        out = body(Scope(tensors, config, compile_config, taps))
        # A tap may be the very tensor of an output; results must not share memory.
        return out | {f"tap.{name}": value.clone() for name, value in (taps or {}).items()}

    return run


# The prologue's; layers name a weight module "engram" too, of which none starts like this.
_CONSTANT_PREFIXES = (
    "inv_freq.",
    "engram.token_map",
    "engram.pad",
    "engram.multipliers.",
    "engram.primes.",
    "engram.offsets.",
)


def family_calls(
    config: TextConfig, compile_config: CompileConfig, bucket: BucketKey
) -> Iterator[FamilyCall]:
    """Yield the calls of a step in order: prologue, every layer, epilogue."""
    with_taps = bucket.variant is Variant.TAPS
    environment = _Environment()

    def call(
        label: str,
        family: str,
        body: Callable[[Scope], dict[str, Tensor]],
        names: Mapping[str, str],
        prefix: str,
    ) -> FamilyCall:
        current = dict(environment.values)

        def bind(local: str) -> str:
            if local in names:
                target = names[local]
                return current.get(target, target)
            if local in STEP_INPUTS:
                return f"step.{local}"
            if local in current:
                return current[local]
            if local.startswith(_CONSTANT_PREFIXES):
                return f"const.{local}"
            return prefix + local

        function = _family_function(body, config, compile_config, with_taps)
        return FamilyCall(label, family, function, bind, lambda n: environment.publish(label, n))

    names = {"block_table": "cache.block_table"}
    yield call("prologue", "prologue", prologue, names, "")
    for layer, spec in enumerate(layer_specs(config)):
        names = _layer_names(config, layer, spec)
        yield call(
            f"layers.{layer}",
            spec.name,
            partial(block, layer=spec),
            names,
            f"layers.{layer}.",
        )
    names = {"block_table": "cache.block_table"}
    yield call("epilogue", "epilogue", _EPILOGUES[bucket.variant], names, "")


_EPILOGUES = {
    Variant.SAMPLE: sample_epilogue,
    Variant.SCORE: score_epilogue,
    Variant.TAPS: score_epilogue,
    Variant.SAMPLE_ALL: sample_all_epilogue,
    Variant.SAMPLE_PROMPT: sample_prompt_epilogue,
}


def _layer_names(config: TextConfig, layer: int, spec: LayerSpec) -> dict[str, str]:
    source = config.kv_source(layer)
    names = {
        "block_table": "cache.block_table",
        "cache.window": f"cache.layers.{layer}.window",
        "cache.compressed": f"cache.layers.{source}.compressed",
        "cache.index_key": f"cache.layers.{source}.index_key",
        "cache.raw": f"cache.layers.{layer}.raw",
        "rope": "rope.compress.1" if spec.ratio else "rope.window",
        "rope_group": f"rope.compress.{spec.ratio}",
    }
    if spec.has_engram:
        names["engram_rows"] = f"engram_rows.{config.engram_layer_ids.index(layer)}"
    return names
