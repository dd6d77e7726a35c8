"""The README names only what exists: targets, modules and flags."""

import functools
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PACKAGES = ("backends", "graphs", "model", "passes", "runtime")

FENCED = re.findall(r"^```\w*\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
INLINE = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", README, flags=re.M | re.S))


def shell_lines(blocks):
    """Return the commands of fenced blocks: continued lines joined, comments removed."""
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.split(" #")[0].strip() for line in lines]


CODE = [*shell_lines(FENCED), *INLINE]


def targets(code):
    return {name for text in code for name in re.findall(r"\bmake ([a-z][a-z-]*)", text)}


def commands(code):
    """Yield (module, flags) of every `python -m` command of ours."""
    for text in code:
        match = re.search(r"python[\d.]* -m ([\w.]+)(.*)", text)
        if match and match[1].split(".")[0] in PACKAGES:
            yield match[1], re.findall(r"(?<![\w-])(--[a-z][a-z-]*)", match[2])


def bare_flags(inline):
    """Return the flags named by themselves, as in `--kind inductor`."""
    return {match[0] for text in inline if (match := re.match(r"--[a-z][a-z-]*", text))}


MODULES = sorted({module for module, _ in commands(CODE)})


@functools.cache
def help_text(module):
    command = [sys.executable, "-m", module, "--help"]
    environment = {**os.environ, "COLUMNS": "100"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def knows_flag(module, flag):
    return re.search(re.escape(flag) + r"(?![\w-])", help_text(module)) is not None


def test_the_first_screen_has_the_two_commands():
    first_screen = README.splitlines()[:40]
    assert {"offline", "test"} <= targets(first_screen)


def test_every_target_is_in_the_makefile():
    defined = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert targets(CODE) <= defined


@pytest.mark.parametrize("module", MODULES)
def test_every_module_exists(module):
    assert importlib.util.find_spec(module) is not None


@pytest.mark.parametrize("module", MODULES)
def test_every_flag_of_a_command_is_in_its_help(module):
    named = {flag for name, flags in commands(CODE) if name == module for flag in flags}
    assert [flag for flag in sorted(named) if not knows_flag(module, flag)] == []


def test_every_flag_named_alone_is_in_the_help_of_some_command():
    flags = sorted(bare_flags(INLINE))
    assert [flag for flag in flags if not any(knows_flag(m, flag) for m in MODULES)] == []


def test_every_file_named_exists():
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    file_map = "".join(re.findall(r"^```text\n(.*?)^```", README, re.MULTILINE | re.DOTALL))
    mapped = re.findall(r"^\s*(\S*[/.]\S*)", file_map, re.MULTILINE)
    inline = [text for text in INLINE if re.fullmatch(r"[\w./-]+/[\w.-]+\.(py|md)", text)]
    named = [*links, *mapped, *inline]
    assert len(mapped) >= 7
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_parsers_see_what_they_should():
    code = ["python -m runtime.offline --prompt 'a' --max-tokens 3", "python3 -m venv --clear x"]
    assert list(commands(code)) == [("runtime.offline", ["--prompt", "--max-tokens"])]
    assert shell_lines(["a \\\n  b # why\n"]) == ["a    b"]
    assert targets(["make check # all", "PYTHON=x make setup"]) == {"check", "setup"}
    assert bare_flags(["--kind inductor", "a --flag"]) == {"--kind"}
