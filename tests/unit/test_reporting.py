"""Metrics, progress, the log, and the catalogue of errors."""

import io
import logging
import re
import string

import pytest

from graphs.errors import EngineError
from runtime import errors
from runtime.config import SamplingParams
from runtime.errors import CounterMismatch
from runtime.log import PACKAGES, configure_logging
from runtime.metrics import COUNTERS, Metrics, peak_memory_bytes
from runtime.progress import Progress
from runtime.request import Chunk, Request, StepPlan


class Clock:
    """Seconds that a test moves."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def plan(num_prefill, num_decode):
    chunk = Chunk(Request("r", [1], SamplingParams(), 0), 0, 1, True)
    return StepPlan((chunk,), num_prefill + num_decode, 1, num_prefill, num_decode)


class TestMetrics:
    def test_a_mixed_step_is_split_by_tokens(self):
        clock = Clock()
        metrics = Metrics(clock=clock)
        metrics.record_step(plan(8, 0), 2.0)
        metrics.record_step(plan(3, 1), 4.0)
        metrics.record_step(plan(0, 4), 1.0)
        clock.now += 10
        metrics.record_finished("a", 11, 5, num_preemptions=2)
        metrics.record_failed()
        result = metrics.to_dict()
        assert result["prefill"] == {"tokens": 11, "time_s": 5.0, "tokens_per_s": 2.2}
        assert result["decode"] == {"tokens": 5, "time_s": 2.0, "tokens_per_s": 2.5}
        assert (result["steps"], result["mixed_steps"], result["preemptions"]) == (3, 1, 2)
        assert result["requests"] == {"finished": 1, "failed": 1}
        assert (result["prompt_tokens"], result["output_tokens"]) == (11, 5)
        assert (result["time_s"], result["output_tokens_per_s"]) == (10.0, 0.5)

    def test_first_tokens_count_from_the_arrival_of_each_request(self):
        clock = Clock()
        metrics = Metrics(clock=clock)
        for name in "abc":
            metrics.record_arrival(name)
            clock.now += 1
        for name in "cab":
            clock.now += 1
            metrics.record_first_token(name)
            clock.now += 1
            metrics.record_first_token(name)  # its second token changes nothing
        expected = {"first": 2.0, "median": 6.0, "max": 7.0}
        assert metrics.to_dict()["time_to_first_token_s"] == expected

    def test_nothing_measured_is_no_number(self):
        result = Metrics(clock=Clock()).to_dict()
        assert result["time_to_first_token_s"] is None
        assert result["output_tokens_per_s"] is None
        assert result["decode"]["tokens_per_s"] is None
        assert result["counters"] == dict.fromkeys(COUNTERS, 0)

    def test_phases_add_up_even_when_they_fail(self):
        clock = Clock()
        metrics = Metrics(clock=clock)
        for _ in range(2):
            with pytest.raises(KeyError), metrics.phase("load"):
                clock.now += 3
                raise KeyError
        clock.now += 1
        metrics.start_job()
        assert metrics.to_dict()["phases_s"] == {"load": 6.0}
        assert metrics.to_dict()["time_s"] == 0.0

    def test_expect_compares_exactly_and_only_inside(self):
        metrics = Metrics({"traces": 5})
        with metrics.expect(traces=2, replays=0):
            metrics.count("traces", 2)
        moved = pytest.raises(CounterMismatch, match="'traces' moved by 1, expected 0")
        with moved, metrics.expect(traces=0):
            metrics.count("traces")
        assert metrics.counters["traces"] == 8
        with pytest.raises(KeyError):
            metrics.count("trace")

    def test_peak_memory_is_in_bytes(self):
        # An interpreter with torch holds between 50 MB and 50 GB; KiB or pages would fall outside.
        assert 5e7 < peak_memory_bytes() < 5e10


class Terminal(io.StringIO):
    def isatty(self):
        return True


class TestProgress:
    def test_a_plain_line_every_ten_seconds(self):
        clock, stream = Clock(), io.StringIO()
        with Progress("weights", 3_000_000, "B", stream=stream, clock=clock) as bar:
            for _ in range(25):
                clock.now += 1
                bar.update(100_000)
        assert stream.getvalue().splitlines() == [
            "weights: 1.0M of 3.0M B after 10 s",
            "weights: 2.0M of 3.0M B after 20 s",
            "weights: 2.5M of 3.0M B after 25 s",
        ]

    def test_a_short_phase_says_nothing(self):
        clock, stream = Clock(), io.StringIO()
        with Progress("requests", None, "requests", stream=stream, clock=clock) as bar:
            clock.now += 9
            bar.update()
        assert stream.getvalue() == ""

    def test_without_a_total(self):
        clock, stream = Clock(), io.StringIO()
        bar = Progress("requests", None, "requests", stream=stream, clock=clock)
        clock.now += 10
        bar.update(1234)
        bar.close()
        bar.close()
        lines = stream.getvalue().splitlines()
        assert lines == ["requests: 1234 requests after 10 s"] * 2

    def test_a_terminal_gets_a_bar(self):
        stream = Terminal()
        with Progress("graphs", 4, "graphs", stream=stream) as bar:
            bar.update(4)
        assert "graphs: 100%" in stream.getvalue()
        assert "4/4" in stream.getvalue()

    @pytest.mark.parametrize("kind", [io.StringIO, Terminal])
    def test_quiet_is_silent(self, kind):
        clock, stream = Clock(), kind()
        with Progress("graphs", 4, "graphs", quiet=True, stream=stream, clock=clock) as bar:
            clock.now += 60
            bar.update(4)
        assert stream.getvalue() == ""


class TestLog:
    @pytest.fixture(autouse=True)
    def restore(self):
        yield
        for name in PACKAGES:
            logger = logging.getLogger(name)
            logger.handlers.clear()
            logger.setLevel(logging.NOTSET)

    def lines(self, capsys, *levels):
        for level in levels:
            logging.getLogger("graphs.x").log(getattr(logging, level), "%s line", level)
        return capsys.readouterr().err.splitlines()

    def test_lines_carry_level_and_rank_once(self, capsys):
        configure_logging("debug")
        configure_logging("info")
        assert self.lines(capsys, "DEBUG", "INFO", "WARNING") == [
            "INFO [rank 0] graphs.x: INFO line",
            "WARNING [rank 0] graphs.x: WARNING line",
        ]

    @pytest.mark.parametrize("kwargs", [{"quiet": True}, {"rank": 3}])
    def test_quiet_and_other_ranks_only_warn(self, capsys, kwargs):
        configure_logging("debug", **kwargs)
        lines = self.lines(capsys, "DEBUG", "INFO", "WARNING")
        assert len(lines) == 1
        assert lines[0].startswith(f"WARNING [rank {kwargs.get('rank', 0)}]")

    def test_the_root_logger_is_left_alone(self):
        handlers = list(logging.getLogger().handlers)
        configure_logging("debug")
        assert logging.getLogger().handlers == handlers


def catalogue(cls=EngineError):
    for child in cls.__subclasses__():
        yield child
        yield from catalogue(child)


LEAVES = [
    cls for cls in catalogue() if cls.__module__ == errors.__name__ and "message" in vars(cls)
]


class TestCatalogue:
    @pytest.mark.parametrize("cls", LEAVES, ids=lambda cls: cls.__name__)
    def test_a_message_names_its_class_and_has_fields_of_its_own(self, cls):
        assert cls.message.startswith(f"{cls.__name__}: ")
        fields = [name for _, name, _, _ in string.Formatter().parse(cls.message) if name]
        assert fields
        error = cls(**dict.fromkeys(fields, "VALUE"))
        assert str(error).count("VALUE") == len(fields)
        fixed = re.sub(r"\{\w+\}", "", cls.message)
        assert len(fixed.split()) > 3, "a template that only passes its argument on"
        assert "\n" not in cls.message
        assert cls.exit_code in (1, 2, 3, 4)

    def test_only_families_have_no_message(self):
        bases = {
            cls for cls in catalogue() if cls.__module__ == errors.__name__ and cls not in LEAVES
        }
        assert all(cls.__subclasses__() for cls in bases)

    def test_the_classes_of_one_family_share_an_exit_code(self):
        assert {cls.exit_code for cls in catalogue(errors.UsageError)} == {2}
        assert {cls.exit_code for cls in catalogue(errors.MachineError)} == {3}
        assert {cls.exit_code for cls in catalogue(errors.InvariantError)} == {1}
