"""StepProgram: the whole step as an ordered list of unit calls on named tensors.

Global names: weights as in the checkpoint, `cache.*`, `const.*`, `step.*` (static inputs),
`value.*` (activations,
each written once). The buffer plan gives values of equal form one buffer when their lives do not
overlap.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from graphs.bucket import BucketKey
from graphs.tracing import TensorSpec, TracedUnit


@dataclass(frozen=True, slots=True)
class UnitCall:
    """One unit applied to one binding row.

    Args:
        label: where in the model, for example "layers.3".
        unit: key of the traced unit in the program's `units`.
        inputs, outputs: global names, in the order of the unit's inputs and outputs.
    """

    label: str
    unit: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StepProgram:
    """Everything that is replayed for one bucket.

    Args:
        bucket: the padded shape.
        units: unit key -> traced unit; layers of one family share an entry.
        calls: in order of execution.
        results: global names that the runtime reads after a replay.
    """

    bucket: BucketKey
    units: Mapping[str, TracedUnit]
    calls: tuple[UnitCall, ...]
    results: tuple[str, ...]

    def value_specs(self) -> dict[str, TensorSpec]:
        """Return the spec of every value that a call produces."""
        specs: dict[str, TensorSpec] = {}
        for call in self.calls:
            specs.update(zip(call.outputs, self.units[call.unit].outputs.values(), strict=True))
        return specs

    def external_inputs(self) -> dict[str, TensorSpec]:
        """Return the spec of every tensor that must be bound from outside: weights, caches,
        constants, inputs."""
        produced = self.value_specs()
        specs: dict[str, TensorSpec] = {}
        for call in self.calls:
            for name, spec in zip(call.inputs, self.units[call.unit].inputs.values(), strict=True):
                if name not in produced:
                    specs.setdefault(name, spec)
        return specs


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """Where values live.

    Args:
        buffers: spec of each buffer.
        placement: value name -> index of its buffer.
    """

    buffers: tuple[TensorSpec, ...]
    placement: dict[str, int]

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(spec.num_bytes for spec in self.buffers)


def plan_buffers(program: StepProgram) -> BufferPlan:
    """Assign a buffer to every value: reuse one of the same form whose value is no longer
    needed."""
    specs = program.value_specs()
    last_use = dict.fromkeys(program.results, len(program.calls))
    for index, call in enumerate(program.calls):
        for name in call.inputs:
            if name in specs and name not in program.results:
                last_use[name] = index
    buffers: list[TensorSpec] = []
    placement: dict[str, int] = {}
    free: dict[TensorSpec, list[int]] = defaultdict(list)
    for index, call in enumerate(program.calls):
        for name in call.outputs:  # a call never writes into a buffer that it reads
            spec = specs[name]
            if not free[spec]:
                buffers.append(spec)
                free[spec].append(len(buffers) - 1)
            placement[name] = free[spec].pop()
        for name in dict.fromkeys((*call.inputs, *call.outputs)):
            if name in placement and last_use.get(name, index) == index:
                free[specs[name]].append(placement[name])
    return BufferPlan(tuple(buffers), placement)
