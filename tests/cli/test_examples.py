"""The examples run as they stand, and stay short."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("[0-9][0-9]_*.py"))


def run(path, folder):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=folder,
        env=environment,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_there_are_examples():
    assert [path.name for path in EXAMPLES][:2] == ["00_hello.py", "01_batch.py"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_how_to_run_it(path):
    text = path.read_text()
    assert len(text.splitlines()) < 40
    assert f"`python examples/{path.name}`" in text


def test_hello_prints_text(tmp_path):
    assert run(EXAMPLES[0], tmp_path).strip()


def test_batch_prints_every_result_in_order(tmp_path):
    lines = run(EXAMPLES[1], tmp_path).splitlines()
    assert [line.split(":")[0] for line in lines[::2]] == ["0", "1", "2"]
    assert lines[4] == "2: length after 6 tokens"
