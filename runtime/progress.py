"""Progress of one phase on stderr.

A bar on a terminal, a plain line every ten seconds elsewhere, nothing when quiet.
"""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TextIO

INTERVAL_S = 10.0
_SUFFIXES = ("", "k", "M", "G", "T")


class Progress:
    """Show how far a phase is, in its natural unit.

    Use as a context manager, or call `close`.

    Args:
        phase: what is being done, such as "weights".
        total: units in all, None if unknown.
        unit: what is counted, such as "B", "graphs" or "requests".
        quiet: show nothing.
        stream: where to write, by default stderr.
        clock: seconds, monotonic; a test passes its own.
    """

    def __init__(
        self,
        phase: str,
        total: int | None,
        unit: str,
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._phase, self._total, self._unit = phase, total, unit
        self._stream = stream or sys.stderr
        self._clock = clock
        self._done = 0
        self._start = self._last = clock()
        self._has_written = False
        self._is_plain = not quiet and not self._stream.isatty()
        self._bar: Any = None
        if not quiet and not self._is_plain:
            from tqdm import tqdm  # deferred: --help must not pay for it

            self._bar = tqdm(
                total=total,
                desc=phase,
                unit=unit if unit == "B" else f" {unit}",
                unit_scale=unit == "B",
                file=self._stream,
                dynamic_ncols=True,
            )

    def update(self, count: int = 1) -> None:
        """Add `count` finished units."""
        self._done += count
        if self._bar is not None:
            self._bar.update(count)
        elif self._is_plain and self._clock() - self._last >= INTERVAL_S:
            self._write_line()

    def close(self) -> None:
        """Finish the display; a phase that wrote plain lines ends with one."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        elif self._is_plain and self._has_written:
            self._write_line()
        self._is_plain = False

    def _write_line(self) -> None:
        self._last = self._clock()
        self._has_written = True
        total = "" if self._total is None else f" of {_scaled(self._total, self._unit)}"
        seconds = self._last - self._start
        done = _scaled(self._done, self._unit)
        self._stream.write(f"{self._phase}: {done}{total} {self._unit} after {seconds:.0f} s\n")
        self._stream.flush()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _scaled(count: int, unit: str) -> str:
    if unit != "B" or count < 1000:
        return str(count)
    value, power = float(count), 0
    while value >= 1000 and power < len(_SUFFIXES) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.1f}{_SUFFIXES[power]}"
