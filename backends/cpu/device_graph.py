"""Device graph of the CPU: a replay list over static buffers.

Capture keeps the bound calls; replay walks them. Scheduling, buckets and padding above run the same
code as on a
device whose driver records kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from graphs.capture import BoundCall, run_calls


@dataclass(frozen=True, slots=True)
class ReplayList:
    """A captured step on the CPU."""

    calls: tuple[BoundCall, ...]

    def replay(self) -> None:
        """Run the step on its static buffers."""
        run_calls(self.calls)

    @property
    def num_nodes(self) -> int:
        """Unit calls per replay."""
        return len(self.calls)


class CpuGraphBackend:
    """Makes replay lists."""

    name = "cpu"

    def capture(self, calls: Sequence[BoundCall]) -> ReplayList:
        """Keep the calls for replay."""
        return ReplayList(tuple(calls))
