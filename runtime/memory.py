"""The memory plan: what a job will hold, from file headers and the device alone, before anything is
read."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from backends.capability import Capability
from graphs.config import CompileConfig
from model.config import TextConfig
from model.families import StateShape, cache_specs
from model.load import LoadItem
from runtime.config import EngineConfig
from runtime.errors import MemoryTooSmall

_FLOAT_BYTES = 4
_MAPPED_NOTE = "mapped, read on demand"


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One line of the plan.

    Args:
        kind: what it is.
        num_bytes: its size.
        is_resident: it must fit into memory (a memory-mapped file need not).
        note: how the number came about.
    """

    kind: str
    num_bytes: int
    is_resident: bool = True
    note: str = ""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """All rows, and the memory they must fit into."""

    rows: tuple[MemoryRow, ...]
    available_bytes: int

    @property
    def resident_bytes(self) -> int:
        """Bytes that must fit."""
        return sum(row.num_bytes for row in self.rows if row.is_resident)

    def lines(self) -> list[str]:
        """Return the plan as text, one line a row."""
        width = max(len(row.kind) for row in self.rows)
        text = [
            f"  {row.kind:<{width}} {_mebibytes(row.num_bytes)}"
            + (f"  ({row.note})" if row.note else "")
            for row in self.rows
        ]
        total = f"  {'total resident':<{width}} {_mebibytes(self.resident_bytes)}"
        return [
            "memory plan:",
            *text,
            f"{total}  of {_mebibytes(self.available_bytes).strip()} available",
        ]


def weight_rows(items: Sequence[LoadItem]) -> list[MemoryRow]:
    """Return one row per group of weights, Engram tables apart."""
    resident: dict[str, int] = {}
    mapped = 0
    for item in items:
        if item.is_mapped:
            mapped += item.num_bytes
        else:
            resident[item.group] = resident.get(item.group, 0) + item.num_bytes
    rows = [MemoryRow(f"weights: {group}", size) for group, size in resident.items()]
    return [*rows, MemoryRow("Engram tables", mapped, False, _MAPPED_NOTE)] if mapped else rows


def state_bytes(
    config: TextConfig, compile_config: CompileConfig, block_size: int
) -> tuple[int, int]:
    """Return (bytes per block, bytes per request slot), block table not counted."""

    def total(num_slots: int, num_blocks: int) -> int:
        specs = cache_specs(
            config, compile_config, StateShape(num_slots, num_blocks, block_size, 0)
        )
        return sum(spec.num_bytes for spec in specs.values())

    return total(0, 1), total(1, 0)


def step_bytes(config: TextConfig, compile_config: CompileConfig, engine: EngineConfig) -> int:
    """Estimate activations and scratch of the largest step."""
    assert engine.max_num_batched_tokens and engine.max_num_seqs and engine.max_model_len
    rows, act = engine.max_num_batched_tokens, compile_config.act_dtype.itemsize
    streams = rows * config.hc_mult * config.hidden_size
    expert_outputs = rows * config.num_experts_per_tok * config.hidden_size
    heads = rows * config.num_attention_heads * config.head_dim
    scores = rows * engine.max_model_len
    logits = engine.max_num_seqs * config.vocab_size
    keys = 64 * (config.sliding_window + config.index_topk) * config.head_dim
    projections = config.num_attention_heads * config.head_dim * config.q_lora_rank
    widest = max(
        projections, config.vocab_size * config.hidden_size
    )  # decoded to float32 while used
    floats = 3 * streams + 2 * scores + 4 * logits + 2 * keys + widest
    return floats * _FLOAT_BYTES + (3 * streams + 2 * heads + 2 * expert_outputs) * act


def plan_memory(
    items: Sequence[LoadItem],
    config: TextConfig,
    compile_config: CompileConfig,
    engine: EngineConfig,
    capability: Capability,
) -> MemoryPlan:
    """Make the plan of a resolved configuration.

    Raises:
        MemoryTooSmall: it does not fit; the message has the numbers.
    """
    assert engine.kv_blocks is not None and engine.max_num_seqs is not None
    per_block, per_slot = state_bytes(config, compile_config, engine.block_size)
    rows = weight_rows(items)
    rows.append(
        MemoryRow(
            "KV blocks", engine.kv_blocks * per_block, note=f"{engine.kv_blocks} x {per_block} B"
        )
    )
    slots = engine.max_num_seqs + 1
    rows.append(MemoryRow("request state", slots * per_slot, note=f"{slots} x {per_slot} B"))
    rows.append(
        MemoryRow("graphs and scratch", step_bytes(config, compile_config, engine), note="estimate")
    )
    plan = MemoryPlan(tuple(rows), capability.available_bytes)
    if plan.resident_bytes > plan.available_bytes:
        detail = ", ".join(f"{row.kind} {row.num_bytes}" for row in plan.rows if row.is_resident)
        raise MemoryTooSmall(
            what="the job",
            needed_bytes=plan.resident_bytes,
            detail=detail,
            free_bytes=plan.available_bytes,
            hint="Use a machine with more memory, or lower --max-num-batched-tokens, "
            "--max-model-len, --max-num-seqs or --kv-blocks.",
        )
    return plan


def as_json(plan: MemoryPlan) -> dict[str, object]:
    """Return the plan as JSON values."""
    return {
        "available_bytes": plan.available_bytes,
        "resident_bytes": plan.resident_bytes,
        "rows": [dataclasses.asdict(row) for row in plan.rows],
    }


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:12.2f} MiB"
