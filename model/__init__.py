"""DeepSeek-V4.1-Flash, written on the named ops of `graphs.ops`.

The names below are what programs outside the five packages may use: `import model`, then
`model.Checkpoint`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from model.checkpoint import Checkpoint
    from model.config import ModelConfig
    from model.engram_hash import hash_primes
    from model.errors import CompressedVocabMismatch
    from model.load import load_weights
    from model.tokenizer import Tokenizer, engram_token_map
    from model.weights import TensorEntry, tensor_table

__all__ = [
    "Checkpoint",
    "CompressedVocabMismatch",
    "ModelConfig",
    "TensorEntry",
    "Tokenizer",
    "engram_token_map",
    "hash_primes",
    "load_weights",
    "tensor_table",
]

_HOMES = {
    "Checkpoint": "model.checkpoint",
    "CompressedVocabMismatch": "model.errors",
    "ModelConfig": "model.config",
    "TensorEntry": "model.weights",
    "Tokenizer": "model.tokenizer",
    "engram_token_map": "model.tokenizer",
    "hash_primes": "model.engram_hash",
    "load_weights": "model.load",
    "tensor_table": "model.weights",
}


def __getattr__(name: str) -> Any:
    # Deferred: importing one module of the package must not load torch and a tokenizer library.
    if name not in _HOMES:
        message = f"module 'model' has no attribute '{name}'"
        raise AttributeError(message)
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
