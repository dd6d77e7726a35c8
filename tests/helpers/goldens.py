"""The golden cases: tiny checkpoints with expected values of an independent implementation."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

GOLDEN_DIR = Path(__file__).resolve().parents[1] / "golden"
TEXT_CASES = ("text-fp32", "text-quant")
CASES = (*TEXT_CASES, "vision", "dspark")


def golden_dir(case: str) -> Path:
    """Return the checkpoint directory of a case."""
    return GOLDEN_DIR / case


def golden_json(case: str) -> dict[str, Any]:
    """Return a fresh copy of the parsed `config.json` of a case."""
    parsed: dict[str, Any] = json.loads((golden_dir(case) / "config.json").read_text("utf-8"))
    return parsed


def golden_expected(case: str, variant: str = "") -> dict[str, torch.Tensor]:
    """Return the expected values of a case: variant "" (kvquant), "noquant" or "actquant"."""
    name = f"expected_{variant}" if variant else "expected"
    return load_file(golden_dir(case) / f"{name}.safetensors")


def copy_golden(case: str, directory: Path) -> Path:
    """Copy config, tokenizer and weights of a case to a directory that a test may damage."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        shutil.copy(golden_dir(case) / name, directory / name)
    return directory
