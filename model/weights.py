"""The name table of the official checkpoint: every tensor, its shape, its format and its group.

One row of the table is one weight of the model in its logical shape [out, in]. A quantised weight
has a scale tensor beside it in the file, which `TensorEntry` derives. Nothing here opens a file.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from model.config import ModelConfig, TextConfig, VisionConfig

Feature = Literal["text", "draft", "vision"]
Kind = Literal["fp8", "fp4", "engram", "bf16", "f32"]

GROUP_SIZE = 32  # rows and columns of an FP8 block, columns of an FP4 or Engram group
SCALE_DTYPE = "F8_E8M0"

_OFFICIAL_DTYPES: dict[Kind, str] = {
    "fp8": "F8_E4M3",
    "fp4": "I8",
    "engram": "F8_E4M3",
    "bf16": "BF16",
    "f32": "F32",
}
_ITEM_BYTES = {"F8_E4M3": 1, "I8": 1, "BF16": 2, "F32": 4}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One weight of the model.

    Args:
        name: name in the official checkpoint, without `model.` prefix.
        feature: the part of the model that needs it.
        group: what the weight is for, as in memory plans: embed, head, attention, compressor,
            indexer, experts,
            shared_experts, gate, hyper_connection, norm, engram_tables, engram, draft, vision.
        kind: official format: "fp8" 32x32 blocks, "fp4" packed pairs in 1x32 groups, "engram" FP8
            in 1x32 groups,
            "bf16", or "f32" for what must stay float32.
        shape: logical shape, [out, in] for a linear.
    """

    name: str
    feature: Feature
    group: str
    kind: Kind
    shape: tuple[int, ...]

    @property
    def storage_dtype(self) -> str:
        """Official safetensors dtype of the weight."""
        return _OFFICIAL_DTYPES[self.kind]

    @property
    def storage_shape(self) -> tuple[int, ...]:
        """Official stored shape; FP4 holds two values a byte."""
        return self.packed_shape if self.kind == "fp4" else self.shape

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """Shape of the weight as bytes of two FP4 codes."""
        return (*self.shape[:-1], self.shape[-1] // 2)

    @property
    def is_quantized(self) -> bool:
        """Whether the official format has a scale beside the weight."""
        return self.kind in ("fp8", "fp4", "engram")

    @property
    def scale_name(self) -> str:
        """Name of the scale beside a quantised weight."""
        return self.name.removesuffix(".weight") + ".scale"

    @property
    def scale_shape(self) -> tuple[int, int]:
        """Shape of the E8M0 scale beside a quantised weight."""
        rows, columns = self.shape
        groups = -(-columns // GROUP_SIZE)
        return (-(-rows // GROUP_SIZE) if self.kind == "fp8" else rows, groups)

    @property
    def num_bytes(self) -> int:
        """Official bytes of the weight and its scale."""
        total = _num_elements(self.storage_shape) * _ITEM_BYTES[self.storage_dtype]
        return total + _num_elements(self.scale_shape) if self.is_quantized else total


def tensor_table(config: ModelConfig) -> dict[str, TensorEntry]:
    """List every weight of a checkpoint of this config by name; a scale belongs to its weight.

    Source: the released checkpoint of DeepSeek-V4.1-Flash, 96,085 tensors with scales.
    """
    text = config.text_config
    has_image_bias = config.vision_config is not None
    entries = list(_model_entries(text))
    for layer in range(text.num_hidden_layers):
        entries += _layer_entries(text, layer, has_image_bias)
    entries += _draft_entries(text, has_image_bias)
    if config.vision_config is not None:
        entries += _vision_entries(config.vision_config, text.hidden_size)
    return {entry.name: entry for entry in entries}


def official_tensors(config: ModelConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """List every tensor of an official checkpoint, scales included: name to (dtype, shape)."""
    stored: dict[str, tuple[str, tuple[int, ...]]] = {}
    for entry in tensor_table(config).values():
        stored[entry.name] = (entry.storage_dtype, entry.storage_shape)
        if entry.is_quantized:
            stored[entry.scale_name] = (SCALE_DTYPE, entry.scale_shape)
    return stored


def stacked_name(name: str) -> tuple[str, int] | None:
    """Split the name of a routed expert's tensor into the name of its stack and the expert.

    `layers.3.ffn.experts.7.w1.weight` belongs at index 7 of `layers.3.ffn.experts.w1.weight`; other
    names give None.
    """
    head, separator, tail = name.partition(".ffn.experts.")
    if not separator:
        return None
    expert, _, part = tail.partition(".")
    return f"{head}{separator}{part}", int(expert)


def _model_entries(text: TextConfig) -> Iterator[TensorEntry]:
    table = (text.vocab_size, text.hidden_size)
    yield TensorEntry("embed.weight", "text", "embed", "bf16", table)
    yield TensorEntry("head.weight", "text", "head", "bf16", table)
    yield TensorEntry("norm.weight", "text", "norm", "bf16", (text.hidden_size,))


def _layer_entries(text: TextConfig, layer: int, has_image_bias: bool) -> Iterator[TensorEntry]:
    prefix = f"layers.{layer}"
    yield from _block_entries(text, prefix, text.n_routed_experts, has_image_bias)
    if layer in text.kv_source_layer_ids:
        yield from _compressor_entries(text, prefix, text.layer_ratio(layer))
    if layer in text.index_source_layer_ids:
        yield from _indexer_entries(text, prefix, layer in text.kv_source_layer_ids)
    if layer in text.engram_layer_ids:
        rows = text.engram_num_embeddings[text.engram_layer_ids.index(layer)]
        yield from _engram_entries(text, prefix, rows)


def _block_entries(
    text: TextConfig, prefix: str, num_experts: int, has_image_bias: bool
) -> Iterator[TensorEntry]:
    hidden = text.hidden_size
    mixes = text.hc_mult * (text.hc_mult + 2)
    for part in ("attn", "ffn"):
        for tensor, shape in (
            ("fn", (mixes, text.hc_mult * hidden)),
            ("base", (mixes,)),
            ("scale", (3,)),
        ):
            name = f"{prefix}.hc_{part}_{tensor}"
            yield TensorEntry(name, "text", "hyper_connection", "f32", shape)
        yield TensorEntry(f"{prefix}.{part}_norm.weight", "text", "norm", "bf16", (hidden,))
    yield from _attention_entries(text, f"{prefix}.attn")
    yield from _moe_entries(text, f"{prefix}.ffn", num_experts, has_image_bias)


def _attention_entries(text: TextConfig, prefix: str) -> Iterator[TensorEntry]:
    hidden, latent = text.hidden_size, text.head_dim
    heads_dim = text.num_attention_heads * text.head_dim
    output = text.o_groups * text.o_lora_rank
    sinks = (text.num_attention_heads,)
    yield TensorEntry(f"{prefix}.attn_sink", "text", "attention", "f32", sinks)
    linears = {
        "wq_a": (text.q_lora_rank, hidden),
        "wq_b": (heads_dim, text.q_lora_rank),
        "wkv": (latent, hidden),
        "wo_a": (output, heads_dim // text.o_groups),
        "wo_b": (hidden, output),
    }
    for name, shape in linears.items():
        yield TensorEntry(f"{prefix}.{name}.weight", "text", "attention", "fp8", shape)
    for name, size in (("q_norm", text.q_lora_rank), ("kv_norm", latent)):
        yield TensorEntry(f"{prefix}.{name}.weight", "text", "attention", "bf16", (size,))


def _compressor_entries(text: TextConfig, prefix: str, ratio: int) -> Iterator[TensorEntry]:
    shape = (text.head_dim, text.hidden_size)
    # A ratio-1 compressor pools nothing, so it has no gate.
    names = ("wkv", "wgate") if ratio > 1 else ("wkv",)
    for name in names:
        yield TensorEntry(
            f"{prefix}.attn.compressor.{name}.weight", "text", "compressor", "bf16", shape
        )
    name = f"{prefix}.attn.compressor.norm.weight"
    yield TensorEntry(name, "text", "compressor", "bf16", (text.head_dim,))


def _indexer_entries(text: TextConfig, prefix: str, has_keys: bool) -> Iterator[TensorEntry]:
    prefix, group = f"{prefix}.attn.indexer", "indexer"
    queries = (text.index_n_heads * text.index_head_dim, text.q_lora_rank)
    yield TensorEntry(f"{prefix}.wq_b.weight", "text", group, "fp8", queries)
    heads = (text.index_n_heads, text.hidden_size)
    yield TensorEntry(f"{prefix}.weights_proj.weight", "text", group, "bf16", heads)
    if has_keys:
        keys = (text.index_head_dim, text.head_dim)
        yield TensorEntry(f"{prefix}.wk.weight", "text", group, "bf16", keys)
        yield TensorEntry(f"{prefix}.k_norm.weight", "text", group, "bf16", (text.index_head_dim,))


def _moe_entries(
    text: TextConfig, prefix: str, num_experts: int, has_image_bias: bool
) -> Iterator[TensorEntry]:
    hidden, inner = text.hidden_size, text.moe_intermediate_size
    yield TensorEntry(f"{prefix}.gate.weight", "text", "gate", "bf16", (num_experts, hidden))
    for name in ("bias", "bias_vl") if has_image_bias else ("bias",):
        yield TensorEntry(f"{prefix}.gate.{name}", "text", "gate", "f32", (num_experts,))
    shapes = (("w1", (inner, hidden)), ("w2", (hidden, inner)), ("w3", (inner, hidden)))
    for name, shape in shapes:
        full_name = f"{prefix}.shared_experts.{name}.weight"
        yield TensorEntry(full_name, "text", "shared_experts", "fp8", shape)
    for expert in range(num_experts):
        for name, shape in shapes:
            full_name = f"{prefix}.experts.{expert}.{name}.weight"
            yield TensorEntry(full_name, "text", "experts", "fp4", shape)


def _engram_entries(text: TextConfig, prefix: str, rows: int) -> Iterator[TensorEntry]:
    prefix, hidden, streams = f"{prefix}.engram", text.hidden_size, text.hc_mult
    table = (rows, text.engram_head_dim)
    yield TensorEntry(f"{prefix}.embed.weight", "text", "engram_tables", "engram", table)
    shape = ((streams + 1) * hidden, text.num_engram_columns * text.engram_head_dim)
    yield TensorEntry(f"{prefix}.wkv.weight", "text", "engram", "fp8", shape)
    for name in ("q_weight", "k_weight"):
        yield TensorEntry(f"{prefix}.{name}", "text", "engram", "bf16", (streams, hidden))


def _draft_entries(text: TextConfig, has_image_bias: bool) -> Iterator[TensorEntry]:
    hidden, stages = text.hidden_size, text.num_nextn_predict_layers
    for stage in range(stages):
        experts = text.dspark_n_routed_experts
        for entry in _block_entries(text, f"mtp.{stage}", experts, has_image_bias):
            yield TensorEntry(entry.name, "draft", "draft", entry.kind, entry.shape)
    if stages == 0:
        return
    features = (hidden, len(text.dspark_target_layer_ids) * hidden)
    yield TensorEntry("mtp.0.main_proj.weight", "draft", "draft", "fp8", features)
    last, rank = f"mtp.{stages - 1}", text.dspark_markov_rank
    shapes: dict[str, tuple[int, ...]] = {
        "mtp.0.main_norm.weight": (hidden,),
        f"{last}.norm.weight": (hidden,),
        f"{last}.markov_head.embed.weight": (text.vocab_size, rank),
        f"{last}.markov_head.head.weight": (text.vocab_size, rank),
        f"{last}.confidence_head.proj.weight": (1, hidden + rank),
    }
    for name, shape in shapes.items():
        yield TensorEntry(name, "draft", "draft", "bf16", shape)


def _vision_entries(vision: VisionConfig, text_hidden: int) -> Iterator[TensorEntry]:
    width, inner = vision.hidden_size, vision.intermediate_size
    window = width * vision.downsample_ratio**2
    shapes: dict[str, tuple[int, ...]] = {
        "vision.patch_embed.proj.weight": (width, 3 * vision.patch_size**2),
        "vision.patch_embed.proj.bias": (width,),
        "vision.norm.weight": (width,),
        "aligner.w1.weight": (text_hidden, window),
        "aligner.w1.bias": (text_hidden,),
        "aligner.w2.weight": (text_hidden, text_hidden),
        "aligner.w2.bias": (text_hidden,),
    }
    for block in range(vision.num_hidden_layers):
        prefix = f"vision.blocks.{block}"
        shapes |= {
            f"{prefix}.norm1.weight": (width,),
            f"{prefix}.norm2.weight": (width,),
            f"{prefix}.attn.wqkv.weight": (3 * width, width),
            f"{prefix}.attn.wqkv.bias": (3 * width,),
            f"{prefix}.attn.wo.weight": (width, width),
            f"{prefix}.attn.wo.bias": (width,),
            f"{prefix}.mlp.w1.weight": (2 * inner, width),
            f"{prefix}.mlp.w2.weight": (width, inner),
        }
    for name in ("image_start", "image_newline", "image_end"):
        shapes[name] = (text_hidden,)
    for name, shape in shapes.items():
        yield TensorEntry(name, "vision", "vision", "bf16", shape)


def _num_elements(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
