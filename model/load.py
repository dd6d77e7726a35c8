"""Read the text weights of a checkpoint into tensors, one at a time.

Data goes straight from the file into its destination: an expert into its row of the stack of its
layer, everything else into a tensor of its own. Only a type conversion holds one more tensor.
Engram tables are mapped, not read.
"""

import warnings
from collections.abc import Callable
from io import FileIO
from typing import Literal, NamedTuple

import numpy as np
import torch

from model.checkpoint import Checkpoint
from model.config import ModelConfig
from model.errors import NotANumberScale, TruncatedShard, UnreadableShard
from model.shards import StoredTensor, paused_collector
from model.weights import TensorEntry, stacked_name, tensor_table

DtypePolicy = Literal["official", "reference"]
Progress = Callable[[int, int], None]

# E8M0 scales and packed FP4 codes stay bytes: the ops decode them, and few torch functions take the
# typed forms.
_TORCH_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "I8": torch.uint8,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}


class LoadItem(NamedTuple):
    """One stored tensor and where it goes.

    Args:
        stored: the tensor in its file.
        name: name of the result.
        group: `TensorEntry.group` of the weight.
        row: row of the result for a routed expert, -1 for a tensor of its own.
        shape: shape of the result.
        dtype: type of the result.
        is_mapped: whether the result is a view of the file.
    """

    stored: StoredTensor
    name: str
    group: str
    row: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_mapped: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of this item in the result."""
        stored_item = _TORCH_DTYPES[self.stored.dtype].itemsize
        return self.stored.num_bytes // stored_item * self.dtype.itemsize


def load_plan(
    checkpoint: Checkpoint, config: ModelConfig, dtype_policy: DtypePolicy
) -> list[LoadItem]:
    """List what `load_weights` will do, in file order; reads nothing.

    Args:
        checkpoint: a validated checkpoint.
        config: its config.
        dtype_policy: see `load_weights`.
    """
    items: list[LoadItem] = []
    num_experts = config.text_config.n_routed_experts
    with paused_collector():
        for entry in tensor_table(config).values():
            if entry.feature != "text":
                continue
            weight = checkpoint.tensors[entry.name]
            dtype = _result_dtype(entry, weight.dtype, dtype_policy)
            items.append(_plan_item(entry, entry.name, weight, dtype, num_experts))
            scale = checkpoint.tensors.get(entry.scale_name) if entry.is_quantized else None
            if scale is not None:
                items.append(_plan_item(entry, entry.scale_name, scale, torch.uint8, num_experts))
        items.sort(key=lambda item: (item.stored.file, item.stored.start))
    return items


def load_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    dtype_policy: DtypePolicy,
    progress: Progress | None = None,
) -> dict[str, torch.Tensor]:
    """Load the text model.

    Names are those of the checkpoint without prefix, except that routed experts are stacked:
    `layers.L.ffn.experts.w1.weight` [n_routed_experts, out, in] and `.scale`, likewise w2 and w3.
    FP8 weights are float8_e4m3fn, FP4 weights uint8 with two codes a byte, scales uint8. Engram
    tables are read-only views of their files in the stored type; writing to one is an access
    violation.

    Args:
        checkpoint: a validated checkpoint.
        config: its config.
        dtype_policy: "official" turns plain F32 tensors into bfloat16 unless they are float32 in
            the official format; "reference" keeps them. With both, what is float32 in the
            official format becomes float32.
        progress: called with (bytes done, bytes in all) after each tensor; mapped tables are not
            counted.
    Raises:
        TruncatedShard, UnreadableShard: a file changed or failed since it was opened.
    """
    items = load_plan(checkpoint, config, dtype_policy)
    total = sum(item.stored.num_bytes for item in items if not item.is_mapped)
    weights: dict[str, torch.Tensor] = {}
    done = 0
    reader = _Reader()
    try:
        for item in items:
            if item.is_mapped:
                weights[item.name] = map_tensor(item.stored)
                continue
            _load_item(reader, item, weights)
            done += item.stored.num_bytes
            if progress is not None:
                progress(done, total)
    finally:
        reader.close()
    return weights


def map_tensor(stored: StoredTensor) -> torch.Tensor:
    """Make a read-only view of a stored tensor; pages are read when they are touched.

    Raises:
        UnreadableShard: the file cannot be mapped.
    """
    try:
        # A numpy map is shared and read-only. torch's own map is private and writable, for which
        # the system
        # wants to set memory aside for the whole file.
        array = np.memmap(
            stored.file, np.uint8, mode="r", offset=stored.start, shape=(stored.num_bytes,)
        )
    except (OSError, ValueError) as error:
        raise UnreadableShard(file=stored.file, detail=str(error)) from error
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        data = torch.from_numpy(array)
    # The storage begins at the tensor, so torch accepts whatever address the file gives it.
    return data.view(_TORCH_DTYPES[stored.dtype]).view(stored.shape)


class _Reader:
    """Reads bytes of files, keeping the current one open."""

    def __init__(self) -> None:
        self._file: FileIO | None = None
        self._path = ""

    def read_into(self, stored: StoredTensor, destination: torch.Tensor) -> None:
        """Fill a contiguous tensor of the stored size with the stored bytes."""
        view = destination.view(-1).view(torch.uint8).numpy().data
        position = 0
        try:
            file = self._open(stored.file)
            file.seek(stored.start)
            while position < len(view):  # one call returns at most 2 GiB
                count = file.readinto(view[position:])
                if not count:
                    break
                position += count
        except OSError as error:
            detail = error.strerror or type(error).__name__
            raise UnreadableShard(file=stored.file, detail=detail) from error
        if position < len(view):
            raise TruncatedShard(
                file=stored.file,
                expected=f"at least {stored.start + stored.num_bytes}",
                got=stored.start + position,
                tensor=f"tensor '{stored.name}'",
            )

    def close(self) -> None:
        """Close the current file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, path: str) -> FileIO:
        if self._file is None or self._path != path:
            self.close()
            self._file, self._path = FileIO(path, "r"), path
        return self._file


def _load_item(reader: _Reader, item: LoadItem, weights: dict[str, torch.Tensor]) -> None:
    if item.name not in weights:
        weights[item.name] = torch.empty(item.shape, dtype=item.dtype)
    destination = weights[item.name]
    if item.row >= 0:
        destination = destination[item.row]
    stored_dtype = _TORCH_DTYPES[item.stored.dtype]
    if stored_dtype == item.dtype:
        reader.read_into(item.stored, destination)
        if item.stored.dtype == "F8_E8M0" and bool((destination == 255).any()):
            raise NotANumberScale(file=item.stored.file, name=item.stored.name)
        return
    converted = torch.empty(item.stored.shape, dtype=stored_dtype)
    reader.read_into(item.stored, converted)
    destination.copy_(converted)


def _plan_item(
    entry: TensorEntry, name: str, stored: StoredTensor, dtype: torch.dtype, num_experts: int
) -> LoadItem:
    stack = stacked_name(name)
    shape, row = stored.shape, -1
    if stack is not None:
        name, row = stack
        shape = (num_experts, *shape)
    is_mapped = entry.kind == "engram"
    return LoadItem(stored, name, entry.group, row, shape, dtype, is_mapped)


def _result_dtype(entry: TensorEntry, stored: str, policy: DtypePolicy) -> torch.dtype:
    if entry.kind == "f32":
        return torch.float32
    if stored == "F32" and policy == "official" and entry.kind != "engram":
        return torch.bfloat16
    return _TORCH_DTYPES[stored]
