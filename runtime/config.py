"""Configuration of the engine and of one request, and how the open choices of the former are
closed.

Both classes are frozen and check themselves on construction. `resolve` closes what depends on the
model and the machine and returns a new configuration with a reason for every choice; nothing is
edited afterwards. Long because each field stands here with its rule and its help.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.errors import FieldConflict, MemoryTooSmall
from runtime.fields import (
    as_stored,
    check_fields,
    fields_by_name,
    raise_range,
    setting,
    values_from_mapping,
)

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
DEFAULT_MAX_MODEL_LEN = 4096
MIN_TEMPERATURE = 1e-5  # below it logits / temperature leave the useful range of float32
MIN_REPETITION_PENALTY = 1e-5  # as above: it divides logits
MAX_NUM_SAMPLES = 128  # outputs of one prompt
MAX_STOPS = 16  # stop strings of a request
MAX_LOGPROBS = 20  # alternatives reported beside a token
MAX_LOGIT_BIASES = 1024  # what the static inputs of a step hold

# Requests and tokens a step may hold where nobody says otherwise: what one CPU step finishes in
# well under a second, and what keeps a large accelerator busy.
_DEFAULT_SEQS = {"cpu": 32, "cuda": 256}
_DEFAULT_STEP_TOKENS = {"cpu": 512, "cuda": 4096}
_MEMORY_SHARE = 0.9  # of the free memory; the rest is for activations and the allocator
_SLOT_SHARE = 0.5  # of that, at most, for per-request state if we choose the number of requests


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """What the engine is told once, at its start.

    None means that `resolve` chooses. Raises FieldTypeError, FieldRangeError, FieldChoiceError or
    FieldConflict on construction. What changes generated code (numerics, cache_quant, act_quant,
    kind) goes on into CompileConfig.
    """

    model: str | None = setting(
        None,
        flag=True,
        help="checkpoint folder, or hub id: owner/name or owner/name@revision",
        none="the built-in tiny checkpoint",
    )
    revision: str | None = setting(
        None,
        flag=True,
        help="branch, tag or commit of a hub id",
        none="what follows @ in the id, or main",
    )
    max_model_len: int | None = setting(
        None,
        flag=True,
        unit="tokens",
        minimum=2,
        maximum=INT32_MAX,
        help="longest prompt and output together",
        none=f"the model's limit, at most {DEFAULT_MAX_MODEL_LEN}",
    )
    max_num_seqs: int | None = setting(
        None,
        flag=True,
        unit="requests",
        minimum=1,
        maximum=65535,
        help="requests that run at the same time",
        none="32 on cpu, 256 on cuda, fewer if memory is short",
    )
    max_num_batched_tokens: int | None = setting(
        None,
        flag=True,
        unit="tokens",
        minimum=1,
        maximum=INT32_MAX,
        help="tokens of one step, prompts and outputs together",
        none="512 on cpu, 4096 on cuda, at least --max-num-seqs",
    )
    kv_blocks: int | None = setting(
        None,
        flag=True,
        unit="blocks",
        minimum=2,
        maximum=INT32_MAX,
        help="blocks of the key/value pool, the reserved block 0 included",
        none="what all requests at full length need, or what fits",
    )
    block_size: int = setting(
        64,
        flag=True,
        unit="tokens",
        minimum=2,
        maximum=4096,
        help="tokens of one key/value block, a power of two",
    )
    seed: int = setting(
        0,
        flag=True,
        minimum=0,
        maximum=INT64_MAX,
        help="from it the seed of every request that names none is derived",
    )
    numerics: str = setting(
        "official",
        flag=True,
        choices=("official", "reference"),
        help="official: bf16 streams as the checkpoint is meant; reference: float32",
    )
    cache_quant: bool = setting(
        True, flag=True, help="fake-quantise caches and indexer operands as the checkpoint is meant"
    )
    act_quant: bool = setting(
        True, flag=True, help="quantise activations of FP8 and FP4 linears dynamically"
    )
    kind: str = setting(
        "auto",
        flag=True,
        choices=("auto", "reference", "inductor"),
        help="how units run; auto compiles on cuda, uses compiled ones on cpu if a cache has all",
    )
    num_threads: int | None = setting(
        None,
        flag=True,
        unit="threads",
        minimum=1,
        maximum=4096,
        help="CPU threads of one operation",
        none="1 for a small model, else what torch chooses",
    )

    def __post_init__(self) -> None:
        """Check every field and the pairs of fields that must agree."""
        check_fields(self, "EngineConfig")
        if self.block_size & (self.block_size - 1):
            field = fields_by_name(EngineConfig)["block_size"]
            raise_range(field, self.block_size, "EngineConfig", "a power of two from 2 to 4096")
        if self.revision is not None and self.model is None:
            raise FieldConflict(
                where="EngineConfig",
                field="revision",
                value=self.revision,
                other="model",
                other_value=None,
                rule="a revision belongs to a hub id",
                hint="Give --model owner/name, or leave out --revision.",
            )
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if seqs is not None and tokens is not None and tokens < seqs:
            raise FieldConflict(
                where="EngineConfig",
                field="max_num_batched_tokens",
                value=tokens,
                other="max_num_seqs",
                other_value=seqs,
                rule="a step holds at least one token of every running request",
                hint=f"Raise the former to {seqs} or lower the latter to {tokens}.",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    The order in which the device applies the fields is in docs/numerics.md. Lists may stand for
    tuples, one string for `stop` or `bad_words`, and a mapping of token id to number for
    `logit_bias`, which is stored as pairs in order of the id. Raises FieldTypeError,
    FieldRangeError or FieldConflict on construction.
    """

    temperature: float = setting(
        1.0,
        flag=True,
        minimum=0,
        help="divides the logits; 0 takes the largest, the lowest id on ties",
    )
    top_p: float = setting(
        1.0, flag=True, minimum=0, maximum=1, help="sample from the fewest tokens with this mass"
    )
    top_k: int = setting(
        -1,
        flag=True,
        unit="tokens",
        minimum=-1,
        maximum=INT32_MAX,
        help="sample from this many most likely tokens; -1 for all",
    )
    min_p: float = setting(
        0.0,
        flag=True,
        minimum=0,
        maximum=1,
        help="sample from tokens at least this many times as likely as the likeliest",
    )
    seed: int | None = setting(
        None,
        flag=True,
        flag_name="sampling-seed",  # --seed is the engine's
        minimum=0,
        maximum=INT64_MAX,
        help="random seed of the request",
        none="derived from --seed, the id and the prompt",
    )
    n: int = setting(
        1,
        flag=True,
        unit="outputs",
        minimum=1,
        maximum=MAX_NUM_SAMPLES,
        help="outputs drawn for the prompt, each with a seed of its own",
    )
    max_tokens: int = setting(
        16, flag=True, unit="tokens", minimum=1, maximum=INT32_MAX, help="longest output"
    )
    min_tokens: int = setting(
        0,
        flag=True,
        unit="tokens",
        minimum=0,
        maximum=INT32_MAX,
        help="shortest output that may end by itself, an end or stop token not counted",
    )
    stop: tuple[str, ...] = setting(
        (),
        flag=True,
        max_items=MAX_STOPS,
        help="text that ends the output and is cut from it; may be repeated",
    )
    include_stop_str_in_output: bool = setting(
        False, flag=True, help="keep the stop string that was met"
    )
    stop_token_ids: tuple[int, ...] = setting(
        (),
        flag=True,
        minimum=0,
        maximum=INT32_MAX,
        help="token ids that end the output, comma-separated; the one met is kept",
    )
    ignore_eos: bool = setting(False, flag=True, help="do not end at the end-of-sequence token")
    presence_penalty: float = setting(
        0.0,
        flag=True,
        minimum=-2,
        maximum=2,
        help="subtracted from the logit of a token that the output holds",
    )
    frequency_penalty: float = setting(
        0.0,
        flag=True,
        minimum=-2,
        maximum=2,
        help="subtracted from the logit of a token as often as the output holds it",
    )
    repetition_penalty: float = setting(
        1.0,
        flag=True,
        minimum=MIN_REPETITION_PENALTY,
        maximum=10,
        help="divides positive and multiplies negative logits of tokens of prompt and output",
    )
    logit_bias: tuple[tuple[int, float], ...] = setting(
        (),
        flag=True,
        minimum=-100,
        maximum=100,
        max_items=MAX_LOGIT_BIASES,
        help="numbers added to the logits of single token ids",
    )
    allowed_token_ids: tuple[int, ...] | None = setting(
        None,
        flag=True,
        minimum=0,
        maximum=INT32_MAX,
        may_be_empty=False,
        help="the only token ids that may be drawn, comma-separated",
        none="all",
    )
    banned_token_ids: tuple[int, ...] = setting(
        (),
        flag=True,
        minimum=0,
        maximum=INT32_MAX,
        help="token ids that are never drawn, comma-separated",
    )
    bad_words: tuple[str, ...] = setting(
        (),
        flag=True,
        help="text whose tokens are never drawn in a row; may be repeated",
    )
    logprobs: int | None = setting(
        None,
        flag=True,
        unit="tokens",
        minimum=0,
        maximum=MAX_LOGPROBS,
        help="report the log-probability of each output token and of this many likeliest",
        none="report none",
    )
    prompt_logprobs: int | None = setting(
        None,
        flag=True,
        unit="tokens",
        minimum=0,
        maximum=MAX_LOGPROBS,
        help="the same for each prompt token but the first",
        none="report none",
    )
    truncate_prompt_tokens: int | None = setting(
        None,
        flag=True,
        unit="tokens",
        minimum=1,
        maximum=INT32_MAX,
        help="keep only this many tokens of the prompt, the last ones",
        none="keep all",
    )
    skip_special_tokens: bool = setting(
        True, flag=True, help="leave special tokens out of the output text"
    )

    def __post_init__(self) -> None:
        """Check every field and bring it into the form that is stored, which is hashable."""
        where = "SamplingParams"
        check_fields(self, where)
        fields = fields_by_name(SamplingParams)
        for name, field in fields.items():
            value = getattr(self, name)
            if value is not field.default:
                object.__setattr__(self, name, as_stored(field, value))
        if 0 < self.temperature < MIN_TEMPERATURE:
            rule = f"0 (no randomness) or at least {MIN_TEMPERATURE}"
            raise_range(fields["temperature"], self.temperature, where, rule)
        if self.top_p == 0:
            raise_range(fields["top_p"], self.top_p, where, "greater than 0 and at most 1")
        if self.top_k == 0:
            raise_range(
                fields["top_k"], self.top_k, where, f"-1 (all tokens) or from 1 to {INT32_MAX}"
            )
        if self.min_tokens > self.max_tokens:
            raise FieldConflict(
                where=where,
                field="min_tokens",
                value=self.min_tokens,
                other="max_tokens",
                other_value=self.max_tokens,
                rule="an output cannot be longer than its limit",
                hint="Lower the former or raise the latter.",
            )

    @classmethod
    def from_mapping(
        cls,
        mapping: Mapping[str, Any],
        defaults: "SamplingParams | None" = None,
        *,
        where: str = "SamplingParams",
    ) -> "SamplingParams":
        """Build parameters from the fields of a JSON object.

        Args:
            mapping: field names to JSON values. Types are strict: true is not 1, "1" is not 1; an
                integer may stand for a float, a list for a tuple, one string for a list of one, an
                object for `logit_bias`, null where the field may be None.
            defaults: values of the fields that the mapping leaves out.
            where: how messages name the source.
        Raises:
            UnknownField: a key that is no field, with the nearest names.
            FieldTypeError, FieldRangeError, FieldConflict: a value that breaks its rule.
        """
        values = values_from_mapping(cls, mapping, where)
        return dataclasses.replace(defaults or cls(), **values)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """What `resolve` must know about the model and the machine.

    Attributes:
        max_position_embeddings: longest sequence of the model, tokens.
        device: "cpu" or "cuda".
        bytes_per_block: size of one key/value block at the configured block size, all layers.
        bytes_per_slot: size of the fixed state of one request, all layers.
        free_memory_bytes: memory left for state and caches after the weights.
        num_threads: threads that the compute library uses unless told otherwise.
        has_compiled_units: whether a cache holds every compiled unit of this configuration.
    """

    max_position_embeddings: int
    device: str
    bytes_per_block: int
    bytes_per_slot: int
    free_memory_bytes: int
    num_threads: int = 1
    has_compiled_units: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """One choice that `resolve` made: which field, the value, and why."""

    field: str
    value: int | str
    reason: str


def resolve(config: EngineConfig, facts: ModelFacts) -> tuple[EngineConfig, list[Decision]]:
    """Close every open choice of a configuration.

    Args:
        config: fields that are None or "auto" are chosen here; the others are kept and checked.
        facts: model and machine.
    Returns:
        a new configuration without None (except `model`) and without "auto"; the decisions in field
        order.
    Raises:
        FieldRangeError: max_model_len exceeds the model.
        MemoryTooSmall: state and blocks do not fit (exit code 3).
    """
    chosen: list[Decision] = []
    max_len = _resolve_max_model_len(config, facts, chosen)
    seqs = _resolve_max_num_seqs(config, facts, chosen)
    tokens = _resolve_step_tokens(config, facts, seqs, chosen)
    blocks = _resolve_kv_blocks(config, facts, max_len, seqs, chosen)
    kind = config.kind
    if kind == "auto":
        kind, reason = _resolve_kind(facts)
        chosen.append(Decision("kind", kind, reason))
    threads = config.num_threads
    if threads is None:
        threads = facts.num_threads
        chosen.append(Decision("num_threads", threads, "by the size of the model and the cores"))
    resolved = dataclasses.replace(
        config,
        max_model_len=max_len,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        kv_blocks=blocks,
        kind=kind,
        num_threads=threads,
    )
    return resolved, chosen


def _resolve_max_model_len(config: EngineConfig, facts: ModelFacts, chosen: list[Decision]) -> int:
    limit = facts.max_position_embeddings
    if config.max_model_len is None:
        value = min(limit, DEFAULT_MAX_MODEL_LEN)
        reason = f"the default; the model allows {limit}"
        if value == limit:
            reason = "max_position_embeddings of the model"
        chosen.append(Decision("max_model_len", value, reason))
        return value
    if config.max_model_len > limit:
        field = fields_by_name(EngineConfig)["max_model_len"]
        rule = f"at most max_position_embeddings of the model, {limit}"
        raise_range(field, config.max_model_len, "EngineConfig", rule)
    return config.max_model_len


def _resolve_max_num_seqs(config: EngineConfig, facts: ModelFacts, chosen: list[Decision]) -> int:
    if config.max_num_seqs is not None:
        return config.max_num_seqs
    value, reason = _DEFAULT_SEQS[facts.device], f"the {facts.device} default"
    if config.max_num_batched_tokens is not None and config.max_num_batched_tokens < value:
        value, reason = config.max_num_batched_tokens, "no more requests than tokens in a step"
    if facts.bytes_per_slot:
        budget = int(facts.free_memory_bytes * _MEMORY_SHARE * _SLOT_SHARE)
        room = max(budget // facts.bytes_per_slot - 1, 1)
        if room < value:
            value = room
            reason = f"state of {facts.bytes_per_slot} bytes each in half of the memory"
    chosen.append(Decision("max_num_seqs", value, reason))
    return value


def _resolve_step_tokens(
    config: EngineConfig, facts: ModelFacts, seqs: int, chosen: list[Decision]
) -> int:
    if config.max_num_batched_tokens is not None:
        return config.max_num_batched_tokens
    value, reason = _DEFAULT_STEP_TOKENS[facts.device], f"the {facts.device} default"
    if value < seqs:
        value, reason = seqs, "one token of every running request"
    chosen.append(Decision("max_num_batched_tokens", value, reason))
    return value


def _resolve_kv_blocks(
    config: EngineConfig, facts: ModelFacts, max_len: int, seqs: int, chosen: list[Decision]
) -> int:
    per_request = -(-max_len // config.block_size)
    slots_bytes = (seqs + 1) * facts.bytes_per_slot  # slot 0 takes the padded rows
    budget = int(facts.free_memory_bytes * _MEMORY_SHARE)
    least = (per_request if config.kv_blocks is None else config.kv_blocks - 1) + 1
    needed = slots_bytes + least * facts.bytes_per_block
    if needed > budget:
        detail = (
            f"{seqs + 1} request states of {facts.bytes_per_slot} bytes and "
            f"{least} blocks of {facts.bytes_per_block} bytes"
        )
        raise MemoryTooSmall(
            what="the engine's state",
            needed_bytes=needed,
            detail=detail,
            free_bytes=budget,
            hint="Lower --max-num-seqs, --max-model-len or --kv-blocks.",
        )
    if config.kv_blocks is not None:
        return config.kv_blocks
    wanted, reason = seqs * per_request + 1, f"{seqs} requests of {max_len} tokens"
    if wanted * facts.bytes_per_block > budget - slots_bytes:
        wanted = (budget - slots_bytes) // facts.bytes_per_block
        reason = f"all that fits in {budget} bytes beside {slots_bytes} bytes of request state"
    chosen.append(Decision("kv_blocks", wanted, reason))
    return wanted


def _resolve_kind(facts: ModelFacts) -> tuple[str, str]:
    if facts.device != "cpu":
        return "inductor", f"compiled on {facts.device}; --kind reference interprets instead"
    if facts.has_compiled_units:
        return (
            "inductor",
            "the cache holds every compiled unit; --kind reference interprets instead",
        )
    return "reference", "no cache of compiled units; --kind inductor compiles them in this process"
