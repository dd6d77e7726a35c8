"""The shape of the checkout: its packages are the ones imported, its files keep the house rules."""

import ast
import importlib.util
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("backends", "graphs", "model", "passes", "runtime")
SOURCES = sorted(
    path for folder in (*PACKAGES, "examples", "tests") for path in (ROOT / folder).rglob("*.py")
)
ASKS_FOR_REASON = 500  # lines
MUST_SPLIT = 800  # lines
REASON = "long because"  # what the module docstring of a file between the two limits must say


def fault_of_size(source):
    """Return what is wrong with the length of a file, or None."""
    num_lines = source.count("\n")
    if num_lines > MUST_SPLIT:
        return f"{num_lines} lines; split it, the limit is {MUST_SPLIT}"
    docstring = " ".join((ast.get_docstring(ast.parse(source)) or "").lower().split())
    if num_lines > ASKS_FOR_REASON and REASON not in docstring:
        return f"{num_lines} lines; its docstring must say '{REASON} ...', or split it"
    return None


@pytest.mark.parametrize("package", PACKAGES)
def test_the_package_resolves_inside_this_checkout(package):
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert Path(spec.origin).resolve() == ROOT / package / "__init__.py"


def test_the_build_lists_exactly_the_packages_of_the_tree():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    in_tree = sorted(
        ".".join(path.parent.relative_to(ROOT).parts)
        for package in PACKAGES
        for path in (ROOT / package).rglob("__init__.py")
    )
    assert listed == in_tree


def test_every_module_lies_in_a_package():
    orphans = [
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if not (path.parent / "__init__.py").is_file()
    ]
    assert orphans == []


def test_no_module_is_named_like_one_of_the_standard_library():
    taken = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if (path.parent.name if path.stem == "__init__" else path.stem) in sys.stdlib_module_names
    ]
    assert taken == []


def test_source_is_ascii():
    others = [path for path in SOURCES if not path.read_bytes().isascii()]
    assert [str(path.relative_to(ROOT)) for path in others] == []


def test_long_files_say_why():
    faults = {str(path.relative_to(ROOT)): fault_of_size(path.read_text()) for path in SOURCES}
    assert {file: fault for file, fault in faults.items() if fault} == {}


@pytest.mark.parametrize(
    ("num_lines", "docstring", "is_fine"),
    [
        (500, "Short enough.", True),
        (501, "Says nothing.", False),
        (501, "Long\nbecause the table is one thing.", True),
        (801, "Long because the author likes it.", False),
    ],
)
def test_the_size_rule(num_lines, docstring, is_fine):
    head = f'"""{docstring}"""\n'
    source = head + "\n" * (num_lines - head.count("\n"))
    assert (fault_of_size(source) is None) == is_fine
