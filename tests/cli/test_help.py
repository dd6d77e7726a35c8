"""Help texts: the recorded ones, and what every help must show.

After a change of flags, `PYTHONPATH=. python tests/cli/test_help.py` records them again.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runtime import cli, offline, score
from runtime.config import EngineConfig, SamplingParams
from runtime.fields import fields_by_name, flag_of

GOLDEN = Path(__file__).resolve().parent / "golden"
ROOT = GOLDEN.parents[2]
COMMANDS = {"runtime.offline": offline, "runtime.score": score}
WIDTH = "100"


@pytest.fixture(autouse=True)
def fixed_width(monkeypatch):
    monkeypatch.setenv("COLUMNS", WIDTH)


def help_text(name):
    return COMMANDS[name].make_parser().format_help()


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_is_the_recorded_one(name):
    recorded = (GOLDEN / f"{name}.help.txt").read_text()
    assert help_text(name) == recorded, "the first lines of this file say how to record it again"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_two_examples_that_parse(name):
    _, _, examples = help_text(name).partition("\nexamples:\n")
    lines = [line.strip() for line in examples.splitlines()]
    assert len(lines) == 2
    parser = COMMANDS[name].make_parser()
    for line in lines:
        prefix = f"python -m {name} "
        assert line.startswith(prefix)
        words = re.findall(r'"[^"]*"|\S+', line.removeprefix(prefix))
        parser.parse_args([word.strip('"') for word in words])


@pytest.mark.parametrize("name", COMMANDS)
def test_flags_are_the_fields_and_the_same_everywhere(name):
    actions = COMMANDS[name].make_parser()._actions
    flags = {flag for action in actions for flag in action.option_strings}
    common = {"--model", "--config", "--dump-config", "--json", "--quiet", "--log-level", "--help"}
    engine = {flag_of(field) for field in fields_by_name(EngineConfig).values()} - {""}
    sampling = {flag_of(field) for field in fields_by_name(SamplingParams).values()} - {""}
    assert common | engine <= flags
    assert sampling & flags == (sampling if name == "runtime.offline" else set())


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_quick_and_goes_to_stdout(name):
    """Under a second, the start of the interpreter included: torch is not imported."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    seconds = []
    for _ in range(3):  # the fastest counts: the machine may be busy
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", name, "--help"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        seconds.append(time.perf_counter() - start)
        if seconds[-1] < 1:
            break
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (GOLDEN / f"{name}.help.txt").read_text()
    assert min(seconds) < 1


def test_a_command_without_arguments_exits_2():
    for module in COMMANDS.values():
        assert cli.run_main(module.main, []) == cli.EXIT_USAGE


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    os.environ["COLUMNS"] = WIDTH
    for command in COMMANDS:
        (GOLDEN / f"{command}.help.txt").write_text(help_text(command))
