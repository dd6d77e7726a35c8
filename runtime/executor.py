"""Executor: binds weights and state, captures a step per bucket, and replays it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from backends.capability import Capability
from graphs.bucket import BucketKey
from graphs.capture import GraphBackend, Replayable, bind_program, run_calls
from graphs.config import CompileConfig
from graphs.program import plan_buffers
from graphs.static_io import StaticInputs
from graphs.tracing import TensorSpec
from model.config import TextConfig
from model.families import StateShape, cache_specs
from runtime.build import ProgramBuilder
from runtime.metrics import Metrics


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A bucket that is ready to replay.

    Args:
        inputs: static inputs; write their views, then replay.
        results: global name -> static result tensor, valid after a replay.
        graph: the captured calls.
        buffer_bytes: bytes of the bucket's activations and results.
    """

    inputs: StaticInputs
    results: Mapping[str, Tensor]
    graph: Replayable
    buffer_bytes: int


class Executor:
    """Owns weights, state and captured steps; nothing else computes the model.

    Args:
        config: the model.
        compile_config: numerics and kind.
        capability: of the device.
        backend: captures and replays.
        weights: checkpoint name -> tensor.
        constants: `const.*` name -> tensor.
        state: sizes of the per-request state.
        metrics: counters to fill.
    """

    def __init__(
        self,
        config: TextConfig,
        compile_config: CompileConfig,
        capability: Capability,
        backend: GraphBackend,
        weights: Mapping[str, Tensor],
        constants: Mapping[str, Tensor],
        state: StateShape,
        metrics: Metrics,
    ) -> None:
        specs = cache_specs(config, compile_config, state)
        self.caches = {
            name: torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device)
            for name, spec in specs.items()
        }
        self.tensors = {**weights, **constants, **self.caches}
        external = {name: TensorSpec.of(tensor) for name, tensor in self.tensors.items()}
        self.builder = ProgramBuilder(config, compile_config, capability, external)
        self._backend = backend
        self._vocab_size = config.vocab_size
        self._metrics = metrics
        self._steps: dict[BucketKey, CapturedStep] = {}

    @property
    def block_table(self) -> Tensor:
        """Blocks of every request slot, int32 [num_slots, max_blocks]."""
        return self.caches["cache.block_table"]

    @property
    def captured(self) -> Mapping[BucketKey, CapturedStep]:
        """The buckets captured so far."""
        return self._steps

    def step(self, bucket: BucketKey) -> CapturedStep:
        """Return a bucket's captured step, building and capturing it on first use."""
        if bucket not in self._steps:
            with self._metrics.phase("capture"):
                self._steps[bucket] = self._capture(bucket)
        return self._steps[bucket]

    @torch.inference_mode()
    def replay(self, step: CapturedStep) -> None:
        """Run a captured step on what its static inputs hold."""
        step.graph.replay()
        self._metrics.count("replays")

    def _capture(self, bucket: BucketKey) -> CapturedStep:
        program, ready = self.builder.build(bucket)
        for name in ("traces", "compiles"):
            self._metrics.counters[name] = getattr(self.builder.counters, name)
        plan = plan_buffers(program)
        inputs = StaticInputs(bucket, self._vocab_size)
        inputs.clear()
        find: Callable[[str], Tensor | None] = lambda name: (  # noqa: E731 - one lookup, two tables
            inputs.views[name.removeprefix("step.")]
            if name.startswith("step.")
            else self.tensors.get(name)
        )
        functions = {key: unit.run for key, unit in ready.items()}
        calls, results = bind_program(program, plan, functions, find)
        with torch.inference_mode():
            run_calls(calls)  # every row is a padded row: nothing real is written
        graph = self._backend.capture(calls)
        self._metrics.count("captures")
        return CapturedStep(inputs, results, graph, plan.num_bytes)
