"""The form of a pass: a function that edits one unit's fx graph in place and reports what it
did."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from backends.capability import Capability
from graphs.tracing import TracedUnit


@dataclass(frozen=True, slots=True)
class PassReport:
    """What a pass did to one unit.

    Args:
        matches: sites changed; zero is normal and visible.
        notes: counts worth showing, for example providers per op.
        seconds: wall time, filled in by the runner.
    """

    matches: int
    notes: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


class PassFunction(Protocol):
    """Signature of every pass."""

    def __call__(self, unit: TracedUnit, capability: Capability) -> PassReport:
        """Edit the unit's graph in place."""


@dataclass(frozen=True, slots=True)
class GraphPass:
    """A pass with its contract.

    Args:
        name: name of its function and file.
        run: the function.
        preserves_numerics: results are the same bits.
        after: passes that must stand before it.
    """

    name: str
    run: PassFunction
    preserves_numerics: bool
    after: tuple[str, ...]


def graph_pass(
    *, preserves_numerics: bool = True, after: tuple[str, ...] = ()
) -> Callable[[PassFunction], GraphPass]:
    """Make a function a pass."""

    def wrap(function: PassFunction) -> GraphPass:
        return GraphPass(function.__name__, function, preserves_numerics, after)  # type: ignore[attr-defined]

    return wrap
