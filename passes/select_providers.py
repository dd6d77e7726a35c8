"""Choose an implementation for every named op and write the choice into the graph.

before:  %y = flashreplay.rms_norm(x, w, eps)
after:   %y = flashreplay.rms_norm(x, w, eps)            meta["provider"] = "reference", or
         %y = <the provider's function>(x, w, eps)       meta["provider"] = its name
"""

from collections import Counter

from backends.capability import Capability
from backends.registry import choose
from graphs.op import op_of_target
from graphs.tracing import TracedUnit
from passes.base import PassReport, graph_pass
from passes.errors import NoProvider


@graph_pass(after=("eliminate_dead_code",))
def select_providers(unit: TracedUnit, capability: Capability) -> PassReport:
    """Give every op node a provider.

    Raises:
        NoProvider: lists every op left without one, with why each candidate refused.
    """
    chosen: Counter[str] = Counter()
    missing: dict[str, str] = {}
    for node in unit.graph.graph.nodes:
        op = op_of_target(node.target)
        if op is None:
            continue
        provider, refusals = choose(op.name, node, capability)
        if provider is None:
            missing[op.name] = "; ".join(refusals)
            continue
        node.target = provider.target
        node.meta["provider"] = provider.name
        chosen[f"{op.name}={provider.name}"] += 1
    if missing:
        ops = ", ".join(f"{name} ({why})" for name, why in missing.items())
        raise NoProvider(unit=unit.name, ops=ops)
    return PassReport(sum(chosen.values()), dict(chosen))
