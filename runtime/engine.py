"""The engine: what a job loads once, and the step that everything else is written around."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from backends.capability import Capability, probe_cpu
from backends.cpu.device_graph import CpuGraphBackend
from graphs.bucket import BucketPolicy, Variant
from graphs.config import CompileConfig, KindName, NumericsName
from graphs.static_io import StaticInputs
from model.checkpoint import Checkpoint
from model.config import ModelConfig
from model.families import StateShape, constants
from model.load import LoadItem, load_plan, load_weights
from model.tokenizer import Tokenizer, engram_token_map
from runtime.config import Decision, EngineConfig, ModelFacts, resolve
from runtime.errors import BlockSizeMismatch, BuiltInModelMissing, MemoryTooSmall
from runtime.executor import Executor
from runtime.hub import locate_model
from runtime.kv_cache import BlockPool, SlotPool
from runtime.launch import pack_sampling, pack_tokens, publish_blocks
from runtime.memory import MemoryPlan, plan_memory, state_bytes, step_bytes, weight_rows
from runtime.metrics import Metrics
from runtime.request import Chunk, Request
from runtime.retire import fail_non_finite, record_logprobs, sampled_tokens
from runtime.sampler import pack_constraints, pack_targets, step_variant
from runtime.scheduler import Scheduler

BUILT_IN_MODEL = Path(__file__).resolve().parents[1] / "examples" / "tiny-v41"

# Below this size of weights an op is over before a second thread has woken up, and on a shared
# machine
# waiting for it costs ten times the op.
_THREADS_PAY_BYTES = 256 * 2**20

LoadProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Everything decided before weights are read; from headers and the device alone.

    Args:
        directory: the checkpoint.
        model: its configuration.
        config: resolved engine configuration.
        decisions: what `resolve` chose, with reasons.
        compile_config: numerics and kind of the graphs.
        capability: the device.
        memory: what the job will hold.
        checkpoint: opened and validated.
        unused: a line for each feature of the checkpoint that does not run yet.
    """

    directory: Path
    model: ModelConfig
    config: EngineConfig
    decisions: tuple[Decision, ...]
    compile_config: CompileConfig
    capability: Capability
    memory: MemoryPlan
    checkpoint: Checkpoint
    unused: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return what a command says before it loads: memory plan, model, decisions."""
        name = self.directory.name
        model = f"model: {name}"
        if self.config.model is None:
            model = (
                f"model: the built-in checkpoint {name} (random weights); --model DIR for another"
            )
        chosen = [f"{d.field} = {d.value} ({d.reason})" for d in self.decisions]
        return [*self.memory.lines(), model, *self.unused, *chosen]


def plan_engine(config: EngineConfig) -> EnginePlan:
    """Read configuration and headers, choose what is open, and check that the job can run here.

    Raises:
        ConfigError, CheckpointError: the model directory.
        ModelNotFound and the other errors of `runtime.hub`: the model's name.
        MemoryTooSmall: the job does not fit (exit code 3).
        FieldRangeError, BlockSizeMismatch: a setting that this model does not allow.
    """
    directory, config = locate_model(config) if config.model else (BUILT_IN_MODEL, config)
    if config.model is None and not directory.is_dir():
        raise BuiltInModelMissing(path=directory)
    model = ModelConfig.from_dir(directory)
    checkpoint = Checkpoint.open(directory)
    summary = checkpoint.validate(model)
    unused = tuple(
        f"not used by this version: {size.num_tensors} tensors, {size.num_bytes} bytes ({feature})"
        for feature, size in summary.by_feature.items()
        if feature != "text" and size.num_tensors
    )
    capability = probe_cpu()
    text = model.text_config
    _check_block_size(config, model)
    draft = CompileConfig(
        numerics=cast(NumericsName, config.numerics),  # EngineConfig checked the choice
        cache_quant=config.cache_quant,
        act_quant=config.act_quant,
    )
    items = load_plan(checkpoint, model, draft.numerics)
    facts = _model_facts(model, config, draft, capability, items)
    resolved, decisions = resolve(config, facts)
    compile_config = CompileConfig(
        numerics=draft.numerics,
        cache_quant=config.cache_quant,
        act_quant=config.act_quant,
        kind=cast(KindName, resolved.kind),
    )
    memory = plan_memory(items, text, compile_config, resolved, capability)
    return EnginePlan(
        directory,
        model,
        resolved,
        tuple(decisions),
        compile_config,
        capability,
        memory,
        checkpoint,
        unused,
    )


def _check_block_size(config: EngineConfig, model: ModelConfig) -> None:
    text = model.text_config
    for ratio in {text.layer_ratio(layer) for layer in range(text.num_hidden_layers)} - {0}:
        if config.block_size % ratio:
            raise BlockSizeMismatch(block_size=config.block_size, ratio=ratio)


def _model_facts(
    model: ModelConfig,
    config: EngineConfig,
    compile_config: CompileConfig,
    capability: Capability,
    items: Sequence[LoadItem],
) -> ModelFacts:
    per_block, per_slot = state_bytes(model.text_config, compile_config, config.block_size)
    rows = weight_rows(items)
    resident = sum(row.num_bytes for row in rows if row.is_resident)
    if resident > capability.available_bytes:
        raise MemoryTooSmall(
            what="the weights",
            needed_bytes=resident,
            detail=", ".join(f"{row.kind} {row.num_bytes}" for row in rows if row.is_resident),
            free_bytes=capability.available_bytes,
            hint="Use a machine with more memory.",
        )
    text = model.text_config
    largest = dataclasses.replace(  # the sizes that `resolve` would choose, or smaller ones
        config,
        max_model_len=config.max_model_len or min(text.max_position_embeddings, 4096),
        max_num_seqs=config.max_num_seqs or 32,
        max_num_batched_tokens=config.max_num_batched_tokens or 512,
        kv_blocks=config.kv_blocks or 2,
    )
    scratch = step_bytes(text, compile_config, largest)
    return ModelFacts(
        max_position_embeddings=model.text_config.max_position_embeddings,
        device=capability.backend,
        bytes_per_block=per_block,
        bytes_per_slot=per_slot,
        free_memory_bytes=max(0, capability.available_bytes - resident - scratch),
        num_threads=1 if resident < _THREADS_PAY_BYTES else torch.get_num_threads(),
    )


class Engine:
    """A loaded model with its scheduler.

    Args:
        plan: what `plan_engine` returned.
        metrics: counters and timings to fill.
        progress: called with (bytes done, bytes in all) while weights load.
    """

    def __init__(
        self, plan: EnginePlan, metrics: Metrics, progress: LoadProgress | None = None
    ) -> None:
        config, text = plan.config, plan.model.text_config
        assert config.max_num_seqs and config.max_num_batched_tokens and config.max_model_len
        assert config.kv_blocks and config.num_threads
        torch.set_num_threads(config.num_threads)
        self.plan = plan
        self.metrics = metrics
        with metrics.phase("load"):
            self.tokenizer = Tokenizer.from_dir(plan.directory, plan.model)
            token_map = (
                engram_token_map(self.tokenizer, plan.model) if text.engram_layer_ids else None
            )
            weights = load_weights(
                plan.checkpoint,
                plan.model,
                dtype_policy=plan.compile_config.numerics,
                progress=progress,
            )
        self.state = StateShape(
            num_slots=config.max_num_seqs + 1,
            num_blocks=config.kv_blocks,
            block_size=config.block_size,
            max_blocks=-(-config.max_model_len // config.block_size),
        )
        self.executor = Executor(
            text,
            plan.compile_config,
            plan.capability,
            CpuGraphBackend(),
            weights,
            constants(plan.model, token_map),
            self.state,
            metrics,
        )
        self.policy = BucketPolicy.preset(config.max_num_seqs, config.max_num_batched_tokens)
        self.blocks = BlockPool(config.kv_blocks, config.block_size)
        self.slots = SlotPool(config.max_num_seqs)
        self.scheduler = Scheduler(
            config, self.blocks, self.slots, eos_token_id=plan.model.eos_token_id
        )


def step(engine: Engine) -> list[Request]:
    """Schedule, replay and retire one step; return the requests that it finished."""
    plan = engine.scheduler.schedule()
    if plan is None:
        return []
    variant = step_variant(plan.chunks)
    is_decode = plan.num_prefill_tokens == 0
    bucket = engine.policy.select(plan.num_tokens, plan.num_sampled, is_decode, variant)
    captured = engine.executor.step(bucket)  # built and captured on first use, between steps
    begin = time.perf_counter()
    failed = pack_step(captured.inputs, plan.chunks, variant)
    publish_blocks(engine.executor.block_table, plan.chunks)
    engine.executor.replay(captured)
    failed += fail_non_finite(captured.results, plan)
    sampled = sampled_tokens(captured.results, plan)
    if variant is not Variant.SAMPLE:
        record_logprobs(captured.results, plan, sampled)
    for request in failed:
        engine.scheduler.abort(request.request_id)
    finished = failed + engine.scheduler.retire(plan, sampled)
    engine.metrics.record_step(plan, time.perf_counter() - begin)
    for request in plan.sampled_requests:
        engine.metrics.record_first_token(request.request_id)
    return finished


def pack_step(inputs: StaticInputs, chunks: Sequence[Chunk], variant: Variant) -> list[Request]:
    """Write everything a step reads into its static inputs; return requests that cannot go on."""
    failed: list[Request] = []
    pack_tokens(inputs, chunks)
    pack_sampling(inputs, chunks)
    if variant is not Variant.SAMPLE:
        failed = pack_constraints(inputs, [chunk for chunk in chunks if chunk.is_sampled])
    if variant is Variant.SAMPLE_PROMPT:
        pack_targets(inputs, chunks)
    return failed
