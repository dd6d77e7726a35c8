"""Capture and replay: the protocol of device graphs, and binding a program to its tensors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from graphs.errors import BindingError
from graphs.kinds import UnitFunction
from graphs.program import BufferPlan, StepProgram
from graphs.tracing import TensorSpec


@dataclass(frozen=True, slots=True)
class BoundCall:
    """A unit with its tensors: fixed addresses in, fixed addresses out."""

    label: str
    run: UnitFunction
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


class Replayable(Protocol):
    """A captured step."""

    def replay(self) -> None:
        """Run the step on its static buffers. Never synchronises."""

    @property
    def num_nodes(self) -> int:
        """Calls that one replay makes."""


class GraphBackend(Protocol):
    """What a device offers for capture; implementations live in
    `backends/<device>/device_graph.py`."""

    name: str

    def capture(self, calls: Sequence[BoundCall]) -> Replayable:
        """Record the calls; they have been run once on the same buffers."""


def bind_program(
    program: StepProgram,
    plan: BufferPlan,
    ready: Mapping[str, UnitFunction],
    find: Callable[[str], Tensor | None],
) -> tuple[list[BoundCall], dict[str, Tensor]]:
    """Bind a program to real tensors.

    Args:
        program: what to run.
        plan: where its values live.
        ready: unit key -> callable.
        find: global name -> weight, cache, constant or static input.
    Returns:
        The bound calls, and the tensors of `program.results`.
    Raises:
        BindingError: a tensor is missing or has another form than the graph was traced for.
    """
    buffers = [spec.empty() for spec in plan.buffers]
    values = {name: buffers[index] for name, index in plan.placement.items()}
    for name, spec in program.external_inputs().items():
        values[name] = _find_checked(name, spec, find, str(program.bucket))
    calls = [
        BoundCall(
            call.label,
            ready[call.unit],
            tuple(values[name] for name in call.inputs),
            tuple(values[name] for name in call.outputs),
        )
        for call in program.calls
    ]
    return calls, {name: values[name] for name in program.results}


def _find_checked(
    name: str, spec: TensorSpec, find: Callable[[str], Tensor | None], where: str
) -> Tensor:
    tensor = find(name)
    hint = "This is a fault of the engine: please report it with the model's config.json."
    if tensor is None:
        raise BindingError(where=where, name=name, expected=spec, got="nothing", hint=hint)
    if TensorSpec.of(tensor) != spec or not tensor.is_contiguous():
        raise BindingError(
            where=where, name=name, expected=spec, got=TensorSpec.of(tensor), hint=hint
        )
    return tensor


@torch.no_grad()
def run_calls(calls: Sequence[BoundCall]) -> None:
    """Run bound calls one after the other, each result copied into its static buffer."""
    for call in calls:
        for buffer, value in zip(call.outputs, call.run(call.inputs), strict=True):
            buffer.copy_(value)
