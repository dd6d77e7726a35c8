"""Kinds of unit: how a traced graph becomes something that runs.

`reference` interprets the fx graph op by op and is the oracle; `inductor` compiles it ahead of time
with
torch.compile's backend. Nothing above this module knows which kind it got.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphs.config import KindName
from graphs.errors import CompileError
from graphs.tracing import TracedUnit

UnitFunction = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class ReadyUnit:
    """A unit that can be called.

    Args:
        run: input tensors in the unit's order -> output tensors in the unit's order.
        compile_s: seconds spent compiling; 0 for interpreted units.
    """

    run: UnitFunction
    compile_s: float


def prepare_unit(unit: TracedUnit, kind: KindName) -> ReadyUnit:
    """Make a traced unit callable.

    Raises:
        CompileError: the compiler refused the graph.
    """
    if kind == "reference":
        module = unit.graph

        def interpret(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            return module(*tensors)

        return ReadyUnit(interpret, 0.0)
    begin = time.perf_counter()
    run = _compile_inductor(unit)
    return ReadyUnit(run, time.perf_counter() - begin)


def _compile_inductor(unit: TracedUnit) -> UnitFunction:
    from torch._inductor import standalone_compile  # imports the compiler stack: seconds

    examples: list[Any] = [spec.empty() for spec in unit.inputs.values()]
    try:
        compiled = standalone_compile(
            unit.graph, examples, dynamic_shapes="from_example_inputs", aot=True
        )
    except (RuntimeError, torch._dynamo.exc.TorchDynamoException) as error:
        hint = "Is a C++ compiler installed? Run the same command with --kind reference meanwhile."
        detail = str(error).strip().splitlines()[-1]
        raise CompileError(kind="inductor", unit=unit.name, detail=detail, hint=hint) from error
    function = compiled

    def run(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return function(*tensors)

    return run
