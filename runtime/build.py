"""Building of step programs: the only place that puts model, passes and kinds together."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from backends.capability import Capability
from graphs.bucket import BucketKey
from graphs.config import CompileConfig
from graphs.kinds import ReadyUnit, prepare_unit
from graphs.program import StepProgram, UnitCall
from graphs.static_io import step_specs
from graphs.tracing import TensorSpec, TracedUnit, record_inputs, trace_unit
from model.config import TextConfig
from model.families import FamilyCall, family_calls
from passes.base import PassReport
from passes.pipeline import run_passes

logger = logging.getLogger(__name__)

Signature = tuple[tuple[str, TensorSpec], ...]


@dataclass(slots=True)
class BuildCounters:
    """What building has cost so far."""

    traces: int = 0
    compiles: int = 0
    trace_s: float = 0.0
    pass_s: float = 0.0
    compile_s: float = 0.0
    passes: dict[str, PassReport] = field(default_factory=dict)


class ProgramBuilder:
    """Traces families once per bucket, rewrites them, and makes them callable.

    Args:
        config: the model.
        compile_config: numerics and kind.
        capability: of the device the graphs are for.
        external: specs of weights, caches and constants by global name.
    """

    def __init__(
        self,
        config: TextConfig,
        compile_config: CompileConfig,
        capability: Capability,
        external: Mapping[str, TensorSpec],
    ) -> None:
        self.counters = BuildCounters()
        self._config = config
        self._compile_config = compile_config
        self._capability = capability
        self._external = external
        self._asked: dict[tuple[str, int], list[tuple[str, ...]]] = {}

    def build(self, bucket: BucketKey) -> tuple[StepProgram, dict[str, ReadyUnit]]:
        """Build the program of one bucket; units are traced and prepared once each."""
        known = dict(self._external)
        inputs_of_step = step_specs(bucket, self._config.vocab_size)
        known |= {f"step.{name}": spec for name, spec in inputs_of_step.items()}
        units: dict[str, TracedUnit] = {}
        by_signature: dict[tuple[str, Signature], str] = {}
        calls = []
        for call in family_calls(self._config, self._compile_config, bucket):
            inputs = self._inputs_of(call, bucket, known)
            signature = (call.family, tuple(inputs.items()))
            if signature not in by_signature:
                by_signature[signature] = f"{call.family}@{len(by_signature)}"
                units[by_signature[signature]] = self._trace(call, inputs, bucket)
            key = by_signature[signature]
            outputs = tuple(call.publish(name) for name in units[key].outputs)
            known |= zip(outputs, units[key].outputs.values(), strict=True)
            calls.append(UnitCall(call.label, key, tuple(call.bind(n) for n in inputs), outputs))
        results = tuple(
            name
            for call in calls
            for name in call.outputs
            if call.label == "epilogue" or ".tap." in name
        )
        ready = {key: self._prepare(unit) for key, unit in units.items()}
        return StepProgram(bucket, units, tuple(calls), results), ready

    def _inputs_of(
        self, call: FamilyCall, bucket: BucketKey, known: Mapping[str, TensorSpec]
    ) -> dict[str, TensorSpec]:
        """Return what the family asks for under this call's bindings, running it on fakes when that
        is new."""

        def resolve(local: str) -> TensorSpec | None:
            return known.get(call.bind(local))

        forms = self._asked.setdefault((call.family, int(bucket.variant)), [])
        for names in forms:
            specs = {name: resolve(name) for name in names}
            scales = {f"{n.removesuffix('.weight')}.scale" for n in names if n.endswith(".weight")}
            fits = all(spec is not None for spec in specs.values())
            if fits and not any(s not in specs and resolve(s) is not None for s in scales):
                return {name: spec for name, spec in specs.items() if spec is not None}
        asked = record_inputs(call.function, resolve)
        forms.append(tuple(asked))
        return asked

    def _trace(
        self, call: FamilyCall, inputs: Mapping[str, TensorSpec], bucket: BucketKey
    ) -> TracedUnit:
        begin = time.perf_counter()
        unit = trace_unit(call.family, call.function, inputs, str(bucket))
        traced = time.perf_counter()
        reports = run_passes(unit, self._capability, self._compile_config.disabled_passes)
        self.counters.traces += 1
        self.counters.trace_s += traced - begin
        self.counters.pass_s += time.perf_counter() - traced
        self.counters.passes.update(reports)
        return unit

    def _prepare(self, unit: TracedUnit) -> ReadyUnit:
        ready = prepare_unit(unit, self._compile_config.kind)
        if self._compile_config.kind != "reference":
            self.counters.compiles += 1
            self.counters.compile_s += ready.compile_s
            logger.info("compiled %s in %.1f s", unit.name, ready.compile_s)
        return ready
