"""Counters and timings of one run, as one dictionary for `--json`.

Nothing here enters a result: results depend on request, model and configuration alone, clocks stay
in this file.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from runtime.errors import CounterMismatch
from runtime.request import StepPlan

COUNTERS = ("traces", "compiles", "jit", "captures", "replays", "graph_misses")


class Metrics:
    """Collect what a run did and how long it took.

    A step that holds both kinds of tokens splits its seconds between prefill and decode in
    proportion to the tokens; `mixed_steps` says how many there were.

    Args:
        counters: the mapping to count in, for example one that the graph layer shares; missing
            names start at 0.
        clock: seconds, monotonic; a test passes its own.
    Attributes:
        counters: graphs traced, compiled, compiled during the job (jit), captured, replayed, and
            steps without a graph.
    """

    def __init__(
        self,
        counters: dict[str, int] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.counters = {} if counters is None else counters
        for name in COUNTERS:
            self.counters.setdefault(name, 0)
        self._clock = clock
        self._start = clock()
        self._built_before_s = 0.0
        self._compiles_before = 0
        self._arrivals: dict[str, float] = {}
        self._first_token_s: list[float] = []
        self._phases_s: dict[str, float] = {}
        self._tokens = {"prefill": 0, "decode": 0}
        self._seconds = {"prefill": 0.0, "decode": 0.0}
        self._steps = self._mixed_steps = 0
        self._finished = self._failed = self._preemptions = 0
        self._prompt_tokens = self._output_tokens = 0

    def count(self, name: str, amount: int = 1) -> None:
        """Add to one of COUNTERS; another name is a KeyError."""
        self.counters[name] += amount

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the start, such as "load" or "capture"; entering it twice adds up."""
        start = self._clock()
        try:
            yield
        finally:
            self._phases_s[name] = self._phases_s.get(name, 0.0) + self._clock() - start

    def start_job(self) -> None:
        """Set the moment from which tokens per second count, after loading and capturing."""
        self._start = self._clock()
        self._built_before_s = self._phases_s.get("capture", 0.0)
        self._compiles_before = self.counters["compiles"]

    def record_arrival(self, request_id: str) -> None:
        """Remember when a request arrived."""
        self._arrivals[request_id] = self._clock()

    def record_first_token(self, request_id: str) -> None:
        """Note that a request has its first output token; later calls for it are ignored."""
        arrival = self._arrivals.pop(request_id, None)
        if arrival is not None:
            self._first_token_s.append(self._clock() - arrival)

    def record_step(self, plan: StepPlan, seconds: float) -> None:
        """Add one step of `seconds`."""
        self._steps += 1
        self._mixed_steps += bool(plan.num_prefill_tokens and plan.num_decode_tokens)
        for name, tokens in (
            ("prefill", plan.num_prefill_tokens),
            ("decode", plan.num_decode_tokens),
        ):
            self._tokens[name] += tokens
            self._seconds[name] += seconds * tokens / plan.num_tokens

    def record_finished(
        self,
        request_id: str,
        num_prompt_tokens: int,
        num_output_tokens: int,
        num_preemptions: int = 0,
    ) -> None:
        """Add one finished request."""
        self._arrivals.pop(request_id, None)
        self._finished += 1
        self._prompt_tokens += num_prompt_tokens
        self._output_tokens += num_output_tokens
        self._preemptions += num_preemptions

    def record_failed(self) -> None:
        """Add one request or line that ended in an error record."""
        self._failed += 1

    @contextmanager
    def expect(self, **deltas: int) -> Iterator[None]:
        """Check by how much counters move inside the block.

        Args:
            **deltas: counter names and the exact amounts.
        Raises:
            CounterMismatch: a counter moved by another amount.
        """
        before = {name: self.counters[name] for name in deltas}
        yield
        for name, expected in deltas.items():
            got = self.counters[name] - before[name]
            if got != expected:
                raise CounterMismatch(name=name, got=got, expected=expected)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values; the end of a name is its unit."""
        seconds = self._clock() - self._start
        building = self._phases_s.get("capture", 0.0) - self._built_before_s
        result: dict[str, Any] = {
            "requests": {"finished": self._finished, "failed": self._failed},
            "prompt_tokens": self._prompt_tokens,
            "output_tokens": self._output_tokens,
            "time_s": seconds,
            "building_s": building,  # of time_s: graphs made on first use
            "output_tokens_per_s": _rate(self._output_tokens, seconds - building),
            "steps": self._steps,
            "mixed_steps": self._mixed_steps,
            "preemptions": self._preemptions,
        }
        for name, tokens in self._tokens.items():
            spent = self._seconds[name]
            result[name] = {
                "tokens": tokens,
                "time_s": spent,
                "tokens_per_s": _rate(tokens, spent),
            }
        result["time_to_first_token_s"] = _spread(self._first_token_s)
        result["phases_s"] = dict(self._phases_s)
        result["peak_memory_bytes"] = peak_memory_bytes()
        during_job = self.counters["compiles"] - self._compiles_before
        result["counters"] = self.counters | {"jit": self.counters["jit"] + during_job}
        return result


def peak_memory_bytes() -> int | None:
    """Return the largest resident size of this process so far, None where nothing tells it."""
    try:
        import resource  # absent on Windows
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None


def _spread(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"first": values[0], "median": statistics.median(values), "max": max(values)}
