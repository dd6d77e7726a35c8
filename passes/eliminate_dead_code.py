"""Remove nodes whose results nobody reads and that write nothing.

before:  %a = linear(x, w)      after:  %b = norm(x)
         %b = norm(x)                   return b
         return b
"""

from backends.capability import Capability
from graphs.tracing import TracedUnit
from passes.base import PassReport, graph_pass


@graph_pass()
def eliminate_dead_code(unit: TracedUnit, capability: Capability) -> PassReport:
    """Remove dead nodes; writes to caches stay, in order."""
    graph = unit.graph.graph
    before = len(graph.nodes)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.is_impure(impure_random=False))
    return PassReport(before - len(graph.nodes))
