"""Who may import whom: the syntax trees of the five packages against one table.

Imports at module load, inside functions and under TYPE_CHECKING obey the same table, and so do
`importlib.import_module` and `__import__` with a literal name. If a type is needed upward, it lives
too high.
"""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Each package may import itself and these; a dotted name admits that module alone.
LAYERS = {
    "graphs": (),
    "model": ("graphs",),
    "backends": ("graphs",),
    "passes": ("graphs", "backends.registry", "backends.capability"),
    "runtime": ("graphs", "model", "backends", "passes"),
}

# Composition roots: they may import anything, and nothing may import them.
ENTRY_MODULES = (
    "graphs.precompile",
    "runtime.offline",
    "runtime.score",
    "runtime.bench",
    "runtime.profiler",
    "runtime.env_report",
)

_MODEL_LIBRARIES = ("torch", "numpy", "safetensors", "tokenizers")
# None: what a device needs, imported inside the implementation that needs it.
THIRD_PARTY = {
    "graphs": ("torch",),
    "model": _MODEL_LIBRARIES,
    "backends": None,
    "passes": ("torch",),
    "runtime": (*_MODEL_LIBRARIES, "huggingface_hub", "tqdm", "xgrammar", "deepseek_recipe"),
}


def module_name(root, path):
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(root, name):
    path = root.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or path.is_dir()


def imported_modules(root, tree):
    """Yield (line, module) for every import; a relative import yields the module name '.'."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield node.lineno, "."
        elif isinstance(node, ast.ImportFrom):
            # `from a import b` imports the module a.b where there is one, else a name of a.
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield node.lineno, inner if is_module(root, inner) else node.module
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else None
            name = function.id if isinstance(function, ast.Name) else name
            if name in ("import_module", "__import__"):
                yield node.lineno, str(node.args[0].value)


def within(module, names):
    return any(module == name or module.startswith(name + ".") for name in names)


def refusal(importer, imported):
    """Return why `importer` may not import `imported`, or None."""
    layer = importer.split(".")[0]
    top = imported.split(".")[0]
    if imported == ".":
        return "relative import; write the full name"
    if within(imported, ENTRY_MODULES):
        return f"{imported} is an entry module; nothing may import it"
    if top in LAYERS:
        if importer in ENTRY_MODULES or within(imported, (layer, *LAYERS[layer])):
            return None
        return f"{layer} may not import {imported}"
    libraries = THIRD_PARTY["runtime" if importer in ENTRY_MODULES else layer]
    if top in sys.stdlib_module_names or libraries is None or top in libraries:
        return None
    return f"{layer} may not import the library {top}"


def violations(root):
    """Return one line per import in the five packages under `root` that breaks the table."""
    found = []
    for package in LAYERS:
        for path in sorted((root / package).rglob("*.py")):
            importer = module_name(root, path)
            for line, imported in imported_modules(root, ast.parse(path.read_text())):
                reason = refusal(importer, imported)
                if reason:
                    found.append(f"{path.relative_to(root)}:{line}: {reason}")
    return found


def exported_names(root, package):
    """Return the names that a package's __init__ binds at its top level or lists in __all__."""
    names = set()
    for node in ast.parse(root.joinpath(*package.split("."), "__init__.py").read_text()).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            targets = {target.id for target in node.targets if isinstance(target, ast.Name)}
            names |= targets
            if "__all__" in targets:  # names that a module-level __getattr__ loads on demand
                names.update(ast.literal_eval(node.value))
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
    return names


def reaches_past_public_names(root, node):
    """Tell whether an import takes more than `__init__` files of the five packages offer."""
    if isinstance(node, ast.Import):
        return any(alias.name.split(".")[0] in LAYERS and "." in alias.name for alias in node.names)
    if node.level:
        return True
    if node.module.split(".")[0] not in LAYERS:
        return False
    if not root.joinpath(*node.module.split("."), "__init__.py").is_file():
        return True
    return not {alias.name for alias in node.names} <= exported_names(root, node.module)


def example_violations(root):
    """Return one line per import in examples/ that is not of public names."""
    return [
        f"{path.relative_to(root)}:{node.lineno}: examples use public names only"
        for path in sorted((root / "examples").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom) and reaches_past_public_names(root, node)
    ]


def has_main_block(tree):
    return any(
        isinstance(node, ast.If)
        and any(isinstance(n, ast.Name) and n.id == "__name__" for n in ast.walk(node.test))
        for node in tree.body
    )


def test_the_checkout_obeys_the_import_table():
    assert violations(ROOT) == []


def test_examples_use_public_names():
    assert example_violations(ROOT) == []


def test_only_entry_modules_have_a_main_block():
    mains = {
        module_name(ROOT, path)
        for package in LAYERS
        for path in (ROOT / package).rglob("*.py")
        if has_main_block(ast.parse(path.read_text()))
    }
    assert mains <= set(ENTRY_MODULES)


# The table once more, as rows of what is allowed, so that a slip in LAYERS does not hide itself.
ALLOWED_PAIRS = {
    *(("model", "graphs"), ("backends", "graphs"), ("passes", "graphs")),
    *(("runtime", below) for below in ("graphs", "model", "backends", "passes")),
    *((package, package) for package in LAYERS),
}


def plant(root, file, source):
    """Write a file into a copy of the package layout that has one module in every package."""
    for package in LAYERS:
        (root / package).mkdir(exist_ok=True)
        (root / package / "__init__.py").touch()
        (root / package / "part.py").touch()
    for name in ("registry", "capability"):
        (root / "backends" / f"{name}.py").touch()
    (root / "runtime" / "offline.py").touch()
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)


@pytest.mark.parametrize("importer", LAYERS)
@pytest.mark.parametrize("imported", LAYERS)
@pytest.mark.parametrize(
    "form",
    [
        "import {0}.part",
        "import {0}",
        "from {0} import part",
        "from {0}.part import name",
        "def f():\n    from {0} import part",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from {0}.part import Name",
        "import importlib\nimportlib.import_module('{0}.part')",
    ],
)
def test_every_cell_of_the_table(tmp_path, importer, imported, form):
    plant(tmp_path, f"{importer}/planted.py", form.format(imported))
    assert (violations(tmp_path) == []) == ((importer, imported) in ALLOWED_PAIRS)


@pytest.mark.parametrize(
    ("file", "source", "reason"),
    [
        ("graphs/ops/deep.py", "import model.part", "graphs may not import model.part"),
        ("passes/p.py", "from backends import part", "passes may not import backends.part"),
        ("passes/p.py", "from backends import *", "passes may not import backends"),
        ("passes/p.py", "import model.part", "passes may not import model.part"),
        ("model/m.py", "from . import part", "relative import"),
        ("model/m.py", "from ..graphs import part", "relative import"),
        ("runtime/r.py", "from runtime import offline", "entry module"),
        ("runtime/r.py", "from runtime.offline import main", "entry module"),
        ("runtime/score.py", "import runtime.offline", "entry module"),
        ("graphs/precompile.py", "import runtime.offline", "entry module"),
        ("graphs/g.py", "import numpy", "the library numpy"),
        ("graphs/g.py", "def f():\n    import triton", "the library triton"),
        ("model/m.py", "import transformers", "the library transformers"),
        ("passes/p.py", "import numpy", "the library numpy"),
        ("runtime/r.py", "import tests.helpers", "the library tests"),
        ("runtime/r.py", "__import__('triton')", "the library triton"),
    ],
)
def test_a_planted_fault_is_found(tmp_path, file, source, reason):
    plant(tmp_path, file, source)
    (line,) = violations(tmp_path)
    assert line.startswith(f"{file}:")
    assert reason in line


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("graphs/g.py", "import math, torch.fx\nfrom torch import Tensor"),
        ("model/m.py", "import numpy, safetensors.torch, tokenizers"),
        ("backends/triton/k.py", "import triton"),
        ("passes/p.py", "from backends import capability, registry\nimport backends.registry"),
        ("graphs/precompile.py", "import runtime.part, model.part, passes.part, tqdm"),
        ("runtime/score.py", "from runtime import part\nfrom backends.part import name"),
    ],
)
def test_what_the_table_admits_passes(tmp_path, file, source):
    plant(tmp_path, file, source)
    assert violations(tmp_path) == []


@pytest.mark.parametrize(
    ("source", "is_public"),
    [
        ("import torch, runtime", True),
        ("from runtime import LLM, Params", True),
        ("from runtime import offline", False),
        ("from runtime import _private", False),
        ("from runtime.part import name", False),
        ("import runtime.part", False),
        ("from . import other", False),
    ],
)
def test_what_an_example_may_import(tmp_path, source, is_public):
    plant(tmp_path, "examples/e.py", source)
    (tmp_path / "runtime" / "__init__.py").write_text(
        "from runtime.part import LLM\nParams = LLM\n__all__ = ['LLM', 'Params']\n"
    )
    assert (example_violations(tmp_path) == []) == is_public
