"""Offline inference of DeepSeek-V4.1-Flash: `from runtime import LLM, SamplingParams,
EngineConfig`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.config import EngineConfig, SamplingParams
    from runtime.llm import LLM
    from runtime.output import ChatOutput, Completion, RequestOutput, TextDelta

__all__ = [
    "LLM",
    "ChatOutput",
    "Completion",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "TextDelta",
]

_HOMES = {
    "LLM": "runtime.llm",
    "ChatOutput": "runtime.output",
    "Completion": "runtime.output",
    "RequestOutput": "runtime.output",
    "TextDelta": "runtime.output",
    "EngineConfig": "runtime.config",
    "SamplingParams": "runtime.config",
}


def __getattr__(name: str) -> Any:
    # Deferred: a command's --help must not import torch.
    if name not in _HOMES:
        raise AttributeError(name)
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
