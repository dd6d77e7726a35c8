"""A long prompt through a tiny model with real selection sizes, in the engine's chunks.

What the ops of every replay receive and return is recorded for sampled rows, so that the test can
check each of them against its definition.
"""

import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from backends.capability import probe_cpu
from backends.cpu.device_graph import CpuGraphBackend
from graphs.bucket import BucketKey, Variant
from graphs.config import CompileConfig
from graphs.op import op_of_target
from model.config import ModelConfig
from model.families import StateShape, constants
from model.weights import stacked_name, tensor_table
from runtime.executor import Executor
from runtime.metrics import Metrics
from tests.helpers.production import production_config

SLOT = 1


@dataclass(frozen=True, kw_only=True)
class LongCase:
    """Sizes of a run; the defaults are production's.

    Args:
        num_tokens: prompt length.
        chunk: tokens of one step.
        sample_from: first position whose rows may be sampled.
        block_size: tokens of a cache block.
    """

    num_tokens: int = 20480
    chunk: int = 512
    sample_from: int = 16384
    block_size: int = 64
    window: int = 128
    index_topk: int = 512
    topk_blocks: int = 2048
    candidate_block_size: int = 8

    def model_config(self) -> ModelConfig:
        """Layers: window; ratio-2 source; ratio-1 source of candidates; its reuse; a reader of
        them."""
        raw = production_config()
        text = raw["text_config"]
        text |= {
            "vocab_size": 256,
            "hidden_size": 64,
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "head_dim": 64,
            "qk_rope_head_dim": 32,
            "q_lora_rank": 32,
            "o_groups": 2,
            "o_lora_rank": 32,
            "sliding_window": self.window,
            "max_position_embeddings": 32768,
            "compress_ratios": [0, 2, 1, 1, 1],
            "kv_source_layer_ids": [1, 2],
            "index_source_layer_ids": [1, 2, 4],
            "index_n_heads": 4,
            "index_head_dim": 32,
            "index_topk": self.index_topk,
            "candidate_source_layer_id": 2,
            "candidate_topk_blocks": self.topk_blocks,
            "candidate_block_size": self.candidate_block_size,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "engram_layer_ids": [],
            "engram_num_embeddings": [],
            "num_nextn_predict_layers": 0,
            "dspark_noise_token_id": 0,
            "dspark_target_layer_ids": [],
        }
        raw |= {"vision_config": None, "quantization_config": None, "image_token_id": 0}
        return ModelConfig.from_dict(raw)


@dataclass
class LongRun:
    """What one run left behind.

    Args:
        positions: the sampled positions, ascending.
        ops: (op name, n-th call in a step) -> argument or output name -> rows of the sampled
            positions.
        taps: result name -> rows of the sampled positions.
        inputs: layer -> its input streams [num_tokens, C, D] and pre mix [num_tokens, C].
        window_records: layer -> cache form of every position's latent.
    """

    case: LongCase
    config: ModelConfig
    executor: Executor
    positions: list[int]
    ops: dict[tuple[str, int], dict[str, Tensor]]
    taps: dict[str, Tensor]
    inputs: dict[int, tuple[Tensor, Tensor]]
    window_records: dict[int, Tensor]
    seconds: float

    @property
    def peak_gib(self) -> float:
        """Peak memory of this process so far, GiB."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak * (1 if sys.platform == "darwin" else 1024) / 2**30


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Return plain float32 weights of every text tensor; experts are stacked."""
    generator = torch.Generator().manual_seed(seed)
    single: dict[str, Tensor] = {}
    stacks: dict[str, list[Tensor]] = defaultdict(list)
    for name, entry in tensor_table(config).items():
        values = torch.randn(entry.shape, generator=generator)
        if entry.group == "norm" or "norm" in name:
            values = 1 + 0.3 * values
        elif len(entry.shape) == 2 and name != "embed.weight":
            values *= entry.shape[1] ** -0.5
        stacked = stacked_name(name)
        if stacked is None:
            single[name] = values
        else:
            stacks[stacked[0]].append(values)
    return single | {name: torch.stack(parts) for name, parts in stacks.items()}


class Recorder(TorchDispatchMode):
    """Hands every call of a named op to a function: (op name, n-th call, arguments, outputs)."""

    def __init__(self, record: Callable[[str, int, dict[str, Any], Any], None]) -> None:
        super().__init__()
        self._record = record
        self._calls: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        op = op_of_target(func)
        if op is not None:
            names = [a.name for a in func._schema.arguments]
            self._record(op.name, self._calls[op.name], dict(zip(names, args, strict=False)), out)
            self._calls[op.name] += 1
        return out


_KEPT_ARGUMENTS = {
    "index_scores": ("query_Thd", "weights_Th"),
    "sparse_attention": ("query_THD",),
}


def run_long_context(case: LongCase, num_rows: int = 64, seed: int = 0) -> LongRun:
    """Run a random prompt in chunks and record what `num_rows` sampled rows compute."""
    config = case.model_config()
    text = config.text_config
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(0, text.vocab_size, (case.num_tokens,), generator=generator)
    free = torch.randperm(case.num_tokens - 1 - case.sample_from, generator=generator)
    sampled = {*(free[: num_rows - 1] + case.sample_from).tolist(), case.num_tokens - 1}
    positions = sorted(sampled)

    num_blocks = -(-case.num_tokens // case.block_size)
    state = StateShape(
        num_slots=2,
        num_blocks=num_blocks + 9,
        block_size=case.block_size,
        max_blocks=num_blocks,
    )
    executor = Executor(
        text,
        CompileConfig(numerics="reference"),
        probe_cpu(),
        CpuGraphBackend(),
        random_weights(config),
        constants(config, None),
        state,
        Metrics(),
    )
    order = torch.randperm(num_blocks + 8, generator=generator)[:num_blocks] + 1
    executor.block_table[SLOT] = order.int()
    begin = time.perf_counter()
    run = LongRun(case, config, executor, positions, {}, {}, {}, {}, 0.0)
    _run_chunks(run, token_ids)
    run.seconds = time.perf_counter() - begin
    return run


def _run_chunks(run: LongRun, token_ids: Tensor) -> None:
    case, num_layers = run.case, run.config.text_config.num_hidden_layers
    step = run.executor.step(BucketKey("prefill", case.chunk, 0, 0, Variant.TAPS, case.chunk))
    ops: dict[tuple[str, int], dict[str, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
    taps, windows = defaultdict(list), defaultdict(list)
    streams, mixes = defaultdict(list), defaultdict(list)
    for start in range(0, case.num_tokens, case.chunk):
        end = min(start + case.chunk, case.num_tokens)
        count = end - start
        views = step.inputs.views
        step.inputs.clear()
        views["token_ids"][:count] = token_ids[start:end].int()
        views["positions"][:count] = torch.arange(start, end).int()
        views["slots"][:count] = SLOT
        views["chunk_starts"][:count] = start
        views["chunk_ends"][:count] = end
        rows = [p - start for p in run.positions if start <= p < end]

        def record(name, call, arguments, out, count=count, rows=rows):
            if name == "sparse_attention":
                windows[call].append(arguments["step_kv"][:count].clone())
                ops[name, call]["out"].append(out[rows].clone())
            for argument in _KEPT_ARGUMENTS.get(name, ()):
                ops[name, call][argument].append(arguments[argument][rows].clone())

        with Recorder(record):
            run.executor.replay(step)
        for name, value in step.results.items():
            if ".tap." in name and rows:
                taps[name].append(value[rows].clone())
        embed = step.results["value.prologue.tap.embed"][:count]
        streams[0].append(embed.unsqueeze(1).repeat(1, 4, 1))
        mixes[0].append(torch.tensor([1.0, 0, 0, 0]).expand(count, -1))
        for layer in range(num_layers):
            prefix = f"value.layers.{layer}.tap."
            streams[layer + 1].append(step.results[f"{prefix}streams"][:count].clone())
            mixes[layer + 1].append(step.results[f"{prefix}pre_mix"][:count].clone())
    run.ops = {key: {n: torch.cat(v) for n, v in kept.items()} for key, kept in ops.items()}
    run.taps = {name: torch.cat(parts) for name, parts in taps.items()}
    run.window_records = {layer: torch.cat(parts) for layer, parts in windows.items()}
    run.inputs = {
        layer: (torch.cat(streams[layer]), torch.cat(mixes[layer]))
        for layer in range(num_layers + 1)
    }
