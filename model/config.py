"""The checkpoint's `config.json` as frozen dataclasses; names and nesting exactly as in the file.

Reading is strict (`model.config_reader`): unknown keys, wrong types and unsupported values are
errors, and the rules between fields that refuse a checkpoint (`model.load_rules`) run at the end.
Rules that concern one feature (bounded replay) or one kernel are not checked here.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from model.config_reader import config_field, fixed_field, read_fields, read_json_object
from model.load_rules import check_config

# Far above any model; a damaged number must not start a loop that never ends.
MAX_LAYERS = 4096
MAX_EXPERTS = 16384


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationConfig:
    """Storage format of the quantised weights; one format exists."""

    quant_method: str = config_field("weight format", "str", choices=("fp8",))
    fmt: str = fixed_field("FP8 variant", "str", "e4m3")
    activation_scheme: str = config_field("scales of activations", "str", choices=("dynamic",))
    weight_block_size: tuple[int, ...] = config_field(
        "rows and columns that share a scale", "ints", choices=((32, 32),)
    )
    scale_fmt: str = config_field("type of the scales", "str", choices=("ue8m0",))
    expert_dtype: str = config_field("format of the routed experts", "str", choices=("fp4",))


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """YaRN parameters; they apply together with `compress_rope_theta` only."""

    rope_type: str = config_field("kind of scaling", "str", choices=("yarn",))
    factor: float = config_field("context extension", "float", above=0.0)
    beta_fast: float = config_field(
        "rotations above which frequencies are kept", "float", above=0.0
    )
    beta_slow: float = config_field(
        "rotations below which frequencies are divided", "float", above=0.0
    )
    original_max_position_embeddings: int = config_field(
        "context before extension", "int", minimum=1
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionConfig:
    """The image tower; validated here, used by a later feature."""

    model_type: str = fixed_field("nested model type", "str", "deepseek_v41_vision")
    hidden_size: int = config_field("width", "int", minimum=1)
    num_hidden_layers: int = config_field("blocks", "int", minimum=1, maximum=MAX_LAYERS)
    num_attention_heads: int = config_field("heads", "int", minimum=1)
    intermediate_size: int = config_field("width of the MLP", "int", minimum=1)
    patch_size: int = config_field("pixels a patch side", "int", minimum=1)
    downsample_ratio: int = config_field("patches a token side", "int", minimum=1)
    rope_theta: float = config_field("rotary base", "float", above=0.0)
    max_image_tokens: int = config_field("tokens of one image", "int", minimum=4)
    min_pixels: int = config_field("smaller images are enlarged to this, pixels", "int")
    max_wh_ratio: float | None = config_field(
        "widest aspect kept", "float", default=None, above=0.0, is_nullable=True
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TextConfig:
    """The text model and its draft module."""

    model_type: str = fixed_field("nested model type", "str", "deepseek_v41_text")
    vocab_size: int = config_field("tokens", "int", minimum=1)
    hidden_size: int = config_field("width of a residual stream", "int", minimum=1)
    num_hidden_layers: int = config_field("decoder blocks", "int", minimum=1, maximum=MAX_LAYERS)
    num_attention_heads: int = config_field("query heads", "int", minimum=1)
    num_key_value_heads: int = fixed_field("shared key-value latents", "int", 1)
    head_dim: int = config_field("width of a head and of the latent", "int", minimum=1)
    qk_rope_head_dim: int = config_field("rotated dims at the end of a head", "int", minimum=2)
    q_lora_rank: int = config_field("query bottleneck", "int", minimum=1)
    o_groups: int = config_field("groups of the output projection", "int", minimum=1)
    o_lora_rank: int = config_field("output bottleneck of a group", "int", minimum=1)
    hidden_act: str = fixed_field("activation", "str", "silu")
    attention_bias: bool = fixed_field("biases in attention", "bool", False)
    attention_dropout: float = fixed_field("dropout", "float", 0.0)
    rms_norm_eps: float = config_field("eps of norms, mHC statistic and Engram", "float", above=0.0)
    sliding_window: int = config_field("window, the query included", "int", minimum=1)
    max_position_embeddings: int = config_field("longest context", "int", minimum=1)
    rope_theta: float = config_field("rotary base of ratio-0 layers", "float", above=0.0)
    compress_rope_theta: float = config_field(
        "rotary base of layers with a ratio", "float", above=1.0
    )
    rope_scaling: RopeScaling | None = field(metadata={"help": "YaRN, null = none"})
    compress_ratios: tuple[int, ...] = config_field(
        "tokens an entry, for each layer; 0 = window only", "ints"
    )
    kv_source_layer_ids: tuple[int, ...] = config_field("layers that write compressed keys", "ints")
    index_source_layer_ids: tuple[int, ...] = config_field("layers that select entries", "ints")
    index_n_heads: int = config_field("indexer heads", "int", minimum=1)
    index_head_dim: int = config_field("width of an indexer head", "int", minimum=1)
    index_topk: int = config_field("entries selected for a query", "int", minimum=1)
    candidate_source_layer_id: int = config_field(
        "index source that makes candidates, -1 = none", "int", minimum=-1, is_nullable=True
    )
    candidate_topk_blocks: int = config_field("blocks kept as candidates", "int")
    candidate_block_size: int = config_field("entries a candidate block", "int")
    n_routed_experts: int = config_field("routed experts", "int", minimum=1, maximum=MAX_EXPERTS)
    num_experts_per_tok: int = config_field("experts a token", "int", minimum=1)
    n_shared_experts: int = fixed_field("experts every token uses", "int", 1)
    moe_intermediate_size: int = config_field("width of an expert", "int", minimum=1)
    scoring_func: str = fixed_field("gate activation", "str", "sqrtsoftplus")
    topk_method: str = fixed_field("expert selection", "str", "noaux_tc")
    norm_topk_prob: bool = fixed_field("routing weights are normalised", "bool", True)
    routed_scaling_factor: float = config_field("factor of the routing weights", "float", above=0.0)
    swiglu_limit: float = config_field("clamp of gate and up, 0 = none", "float")
    hc_mult: int = config_field("residual streams", "int", minimum=1)
    hc_sinkhorn_iters: int = config_field("column normalisations", "int", minimum=1, maximum=1000)
    hc_eps: float = config_field("eps of the mixes", "float", above=0.0)
    engram_layer_ids: tuple[int, ...] = config_field(
        "layers with an n-gram memory, [] = none", "ints"
    )
    engram_num_embeddings: tuple[int, ...] = config_field(
        "table rows for each of them", "ints", minimum=1, maximum=2**63 - 1
    )
    engram_vocab_size: int = config_field("where the prime search starts", "int", maximum=2**63 - 1)
    engram_max_ngram_size: int = config_field("longest n-gram, tokens", "int", maximum=64)
    engram_n_heads: int = config_field("hash heads an n-gram size", "int", maximum=256)
    engram_head_dim: int = config_field("width of a row", "int")
    engram_pad_token_id: int = config_field("raw token id before the first token", "int")
    engram_compressed_vocab_size: int = config_field("keys of the normalised vocabulary", "int")
    num_nextn_predict_layers: int = config_field(
        "draft blocks, 0 = no draft module", "int", maximum=64
    )
    dspark_block_size: int = config_field("draft tokens a round", "int", default=0)
    dspark_noise_token_id: int = config_field("input of the undrafted positions", "int", default=0)
    dspark_target_layer_ids: tuple[int, ...] = config_field(
        "layers the draft reads", "ints", default=()
    )
    dspark_markov_rank: int = config_field("rank of the bigram correction", "int", default=0)
    dspark_n_routed_experts: int = config_field(
        "routed experts of a draft block", "int", default=0, maximum=MAX_EXPERTS
    )
    dspark_num_experts_per_tok: int = config_field("experts a draft token", "int", default=0)
    tie_word_embeddings: bool = fixed_field("embed and head are one tensor", "bool", False)

    @property
    def num_engram_columns(self) -> int:
        """Table rows read for each token and Engram layer."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @property
    def first_ratio_one_layer(self) -> int | None:
        """The first layer with one compressed entry a token, or None."""
        ratios = self.compress_ratios[: self.num_hidden_layers]
        return ratios.index(1) if 1 in ratios else None

    def layer_ratio(self, layer: int) -> int:
        """Tokens per compressed entry of a layer; 0 for window-only and for draft layers."""
        return self.compress_ratios[layer] if layer < self.num_hidden_layers else 0

    def kv_source(self, layer: int) -> int | None:
        """The layer whose compressed keys `layer` reads, None for a window-only layer."""
        return self._source(self.kv_source_layer_ids, layer)

    def index_source(self, layer: int) -> int | None:
        """The layer whose selection `layer` uses, None for a window-only layer."""
        return self._source(self.index_source_layer_ids, layer)

    def _source(self, sources: tuple[int, ...], layer: int) -> int | None:
        if self.layer_ratio(layer) == 0:
            return None
        return max((source for source in sources if source <= layer), default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The whole `config.json` of a checkpoint."""

    architectures: tuple[str, ...] = config_field(
        "model class", "strs", choices=(("DeepseekV41ForCausalLM",),)
    )
    model_type: str = config_field("model type", "str", choices=("deepseek_v41",))
    dtype: str = config_field("compute type, not storage", "str", choices=("bfloat16", "float32"))
    bos_token_id: int = config_field("first token of every sequence", "int")
    eos_token_id: int = config_field("token that ends a sequence", "int")
    pad_token_id: int = config_field("padding token", "int")
    image_token_id: int = config_field(
        "token of image positions, used with vision_config only", "int"
    )
    tie_word_embeddings: bool = fixed_field("embed and head are one tensor", "bool", False)
    quantization_config: QuantizationConfig | None = field(
        default=None, metadata={"help": "null = plain"}
    )
    text_config: TextConfig = field(metadata={"help": "the text model"})
    vision_config: VisionConfig | None = field(default=None, metadata={"help": "null = text only"})

    @classmethod
    def from_dict(cls, raw: object, source: str = "config.json") -> "ModelConfig":
        """Read and check a parsed `config.json`.

        Args:
            raw: the parsed JSON value.
            source: file name for messages.
        Raises:
            ConfigError: a subclass for each kind of fault; see `model.errors`.
        """
        nested = ("text_config", "vision_config", "quantization_config")
        fields = read_fields(cls, raw, source=source, where="", nested=nested)
        objects: dict[str, Any] = raw if isinstance(raw, dict) else {}
        quantization = objects.get("quantization_config")
        if quantization is not None:
            where = "quantization_config"
            arguments = read_fields(QuantizationConfig, quantization, source=source, where=where)
            fields["quantization_config"] = QuantizationConfig(**arguments)
        vision = objects.get("vision_config")
        if vision is not None:
            arguments = read_fields(VisionConfig, vision, source=source, where="vision_config")
            fields["vision_config"] = VisionConfig(**arguments)
        text = _read_text(objects.get("text_config"), source)
        config = cls(text_config=text, **fields)
        check_config(config, source)
        return config

    @classmethod
    def from_dir(cls, path: str | Path) -> "ModelConfig":
        """Read and check `config.json` of a checkpoint directory.

        Raises:
            ConfigError: the file is absent, not JSON, or breaks a rule; see `model.errors`.
        """
        file = Path(path) / "config.json"
        return cls.from_dict(read_json_object(file), source=str(file))


def _read_text(raw: object, source: str) -> TextConfig:
    where = "text_config"
    keys = raw if isinstance(raw, dict) else {}
    # Switches of other engines: they describe this model only at these values.
    fixed = {
        "hc_shifted": True,
        "dspark_target_attn_input": True,
        "use_fp4_sparse_kv": True,
        "gate_temp": 1.0,
        "index_k_source_layer_ids": keys.get("kv_source_layer_ids"),
    }
    fields = read_fields(
        TextConfig, raw, source=source, where=where, nested=("rope_scaling",), fixed=fixed
    )
    scaling = keys.get("rope_scaling")
    if scaling is not None:
        arguments = read_fields(
            RopeScaling,
            scaling,
            source=source,
            where=f"{where}.rope_scaling",
            fixed={"type": "yarn"},
        )
        scaling = RopeScaling(**arguments)
    if fields["candidate_source_layer_id"] is None:
        fields["candidate_source_layer_id"] = -1
    return TextConfig(rope_scaling=scaling, **fields)
