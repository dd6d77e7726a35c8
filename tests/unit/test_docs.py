"""Documents that are made from code say what the code says."""

import importlib.util
import re
from pathlib import Path

import pytest

from graphs.op import OPS
from runtime import cli
from runtime.env import environment_table

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_documents_are_up_to_date(generate):
    assert generate.stale() == [], "run python docs/generate.py"
    assert generate.main(["--check"]) == 0


def test_a_difference_is_found_and_written(generate, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(generate, "HERE", tmp_path)
    for name, write in generate.DOCUMENTS.items():
        (tmp_path / name).write_text(write())
    assert generate.stale(tmp_path) == []
    (tmp_path / "ops.md").write_text("old")
    (tmp_path / "cli.md").unlink()
    monkeypatch.setattr(generate, "stale", lambda: ["cli.md", "ops.md"])
    assert generate.main(["--check"]) == 1
    assert capsys.readouterr().err.count("is out of date") == 2
    assert (tmp_path / "ops.md").read_text() == "old"
    assert generate.main([]) == 0
    assert (tmp_path / "ops.md").read_text() == generate.ops_document()
    assert (tmp_path / "cli.md").read_text() == generate.cli_document()


def test_every_exit_code_is_explained(generate):
    text = (DOCS / "cli.md").read_text()
    codes = {value for name, value in vars(cli).items() if name.startswith("EXIT_")}
    assert {int(code) for code, _ in generate.EXIT_CODES} == codes
    assert all(f"| {code} |" in text for code in codes)


def test_the_command_document_has_every_flag_and_error(generate):
    text = (DOCS / "cli.md").read_text()
    for make in generate.PARSERS:
        section = text.split(f"## `{make().prog}`")[1].split("\n## ")[0]
        for line in make().format_help().splitlines():
            if flag := re.match(r"  (--[a-z-]+)", line):
                assert re.search(rf"`{flag[1]}[ `]", section), flag[1]
    for name in ("MissingShard", "UnknownVariable", "MemoryTooSmall", "EmptyPrompt"):
        assert f"| `{name}` |" in text


def test_the_other_documents_are_whole():
    assert environment_table() in (DOCS / "environment.md").read_text()
    text = (DOCS / "ops.md").read_text()
    assert re.findall(r"^## `(\w+)`", text, re.MULTILINE) == sorted(OPS)


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.md")), ids=lambda path: path.name)
def test_links_and_files_named_exist(path):
    text = path.read_text()
    named = re.findall(
        r"`((?:graphs|model|backends|passes|runtime|tests|docs)/[\w./-]+\.\w+)`", text
    )
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    assert [name for name in named if not (DOCS.parent / name).exists()] == []
    assert [link for link in links if not (path.parent / link).exists()] == []
