"""The pipeline: a literal list of passes, and the runner that applies it."""

import time
from collections.abc import Sequence
from dataclasses import replace

from backends.capability import Capability
from graphs.tracing import TracedUnit
from passes.base import GraphPass, PassReport
from passes.eliminate_dead_code import eliminate_dead_code
from passes.errors import PassOrder, UnknownPass
from passes.select_providers import select_providers

PIPELINE: tuple[GraphPass, ...] = (
    eliminate_dead_code,
    select_providers,
)


def check_pipeline(pipeline: Sequence[GraphPass], disabled: Sequence[str] = ()) -> None:
    """Check the declared order and the names of disabled passes.

    Raises:
        PassOrder: a pass stands before one it must follow.
        UnknownPass: `disabled` names a pass that is not in the pipeline.
    """
    names = [p.name for p in pipeline]
    for name in disabled:
        if name not in names:
            raise UnknownPass(name=name, known=", ".join(names))
    for index, item in enumerate(pipeline):
        for before in item.after:
            if before in names[index:]:
                raise PassOrder(name=item.name, after=before)


def run_passes(
    unit: TracedUnit,
    capability: Capability,
    disabled: Sequence[str] = (),
    pipeline: Sequence[GraphPass] = PIPELINE,
) -> dict[str, PassReport]:
    """Run the pipeline on one unit, in place.

    Args:
        unit: a traced unit.
        capability: of the device the graph is for.
        disabled: names of passes to leave out.
        pipeline: passes in order.
    Returns:
        pass name -> report, in order.
    """
    check_pipeline(pipeline, disabled)
    reports = {}
    for item in pipeline:
        if item.name in disabled:
            continue
        begin = time.perf_counter()
        report = item.run(unit, capability)
        unit.graph.graph.lint()
        reports[item.name] = replace(report, seconds=time.perf_counter() - begin)
    unit.graph.recompile()
    return reports
