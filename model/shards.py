"""Find the weight files of a checkpoint and read their headers; no tensor data is touched.

A safetensors file is an 8-byte little-endian header length, a JSON header and the data. The header
is read here, as one parse of the JSON is the quickest way to the place of each of 96,085 tensors,
and as the scale type F8_E8M0 is then nothing but bytes. Source: the format description of the
safetensors project.
"""

import gc
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from model.errors import (
    AmbiguousCheckpoint,
    CheckpointNotFound,
    DuplicateTensor,
    IndexedTensorAbsent,
    MissingShard,
    TruncatedShard,
    UnindexedTensor,
    UnreadableHeader,
    UnreadableIndex,
    UnreadableShard,
)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own implementation
_ITEM_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
}


class StoredTensor(NamedTuple):
    """Where a tensor lies; a tuple, because a checkpoint has 96,085 of them.

    Args:
        name: name in the file, with `model.` prefix if it has one.
        file: path of the file.
        dtype: safetensors dtype, such as "F8_E4M3".
        shape: stored shape.
        start: first byte in the file.
        num_bytes: bytes of the tensor.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def read_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Read the headers of all weight files of a directory: stored name to place.

    Raises:
        CheckpointError: a subclass for each kind of fault; see `model.errors`.
    """
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if not index.is_file():
        if not single.is_file():
            raise CheckpointNotFound(directory=directory, got=_found(directory))
        return {tensor.name: tensor for tensor in read_header(single)}
    weight_map = _read_index(index)
    shards = sorted(set(weight_map.values()))
    if single.is_file() and SINGLE_FILE not in shards:
        raise AmbiguousCheckpoint(directory=directory, got=f"{len(shards)} other files")
    missing = [shard for shard in shards if not (directory / shard).is_file()]
    if missing:
        example = next(name for name, shard in weight_map.items() if shard == missing[0])
        raise MissingShard(
            directory=directory, total=len(shards), missing=", ".join(missing), tensor=example
        )
    tensors = _merge(read_header(directory / shard) for shard in shards)
    _compare_index(directory, weight_map, tensors)
    return tensors


@contextmanager
def paused_collector() -> Iterator[None]:
    """Hold back the garbage collector while a large table is built.

    Nothing built here is garbage, and walking all objects of the process each time the table grows
    by a quarter takes twice the time of the work itself.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def read_header(path: Path) -> list[StoredTensor]:
    """Read and check the header of one safetensors file.

    Raises:
        UnreadableShard: the file cannot be opened or read.
        TruncatedShard: the file ends before its header or its data.
        UnreadableHeader: anything else that contradicts the format.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) == 8 and length <= _MAX_HEADER_BYTES:
                raw = file.read(length)
    except OSError as error:
        detail = error.strerror or type(error).__name__
        raise UnreadableShard(file=path, detail=detail) from error
    if len(prefix) < 8:
        raise TruncatedShard(file=path, expected="at least 8", got=size, tensor="the header")
    if length > _MAX_HEADER_BYTES:
        raise UnreadableHeader(file=path, detail=f"a header length of {length} bytes")
    if len(raw) < length:
        raise TruncatedShard(
            file=path, expected=f"over {8 + length}", got=size, tensor="the header"
        )
    tensors = _parse_header(path, raw)
    _check_layout(path, tensors, 8 + length, size)
    return tensors


def _parse_header(path: Path, raw: bytes) -> list[StoredTensor]:
    try:
        pairs = json.loads(raw, object_pairs_hook=tuple)
    except (ValueError, RecursionError) as error:
        raise UnreadableHeader(file=path, detail=f"{type(error).__name__}: {error}") from error
    if not isinstance(pairs, tuple):
        raise UnreadableHeader(file=path, detail="JSON that is not an object")
    tensors: dict[str, StoredTensor] = {}
    file, data_start = str(path), 8 + len(raw)
    for name, info in pairs:
        if name == "__metadata__":
            continue
        if name in tensors:
            raise DuplicateTensor(name=name, first=path, second=path)
        tensors[name] = _parse_tensor(file, name, info, data_start)
    return list(tensors.values())


def _parse_tensor(file: str, name: str, info: Any, data_start: int) -> StoredTensor:
    fields = dict(info) if isinstance(info, tuple) else {}
    dtype, shape = fields.get("dtype"), fields.get("shape")
    offsets = fields.get("data_offsets")
    if not (isinstance(dtype, str) and _is_sizes(shape) and _is_sizes(offsets)):
        raise UnreadableHeader(file=file, detail=f"no dtype, shape and offsets for '{name}'")
    if len(offsets) != 2:
        raise UnreadableHeader(file=file, detail=f"{len(offsets)} data_offsets for '{name}'")
    if dtype not in _ITEM_BITS:
        raise UnreadableHeader(file=file, detail=f"the unknown dtype {dtype!r} of '{name}'")
    bits = _ITEM_BITS[dtype]
    for size in shape:
        bits *= size
    start, end = offsets
    if end - start != bits // 8:
        detail = f"{end - start} bytes for '{name}' ({dtype} {shape} has {bits // 8})"
        raise UnreadableHeader(file=file, detail=detail)
    return StoredTensor(name, file, dtype, tuple(shape), data_start + start, end - start)


def _check_layout(path: Path, tensors: list[StoredTensor], start: int, size: int) -> None:
    # The format allows neither holes nor overlaps, so tensors in file order must follow one
    # another.
    position = start
    first_incomplete = None
    for tensor in sorted(tensors, key=attrgetter("start", "num_bytes")):
        if tensor.start != position:
            detail = f"'{tensor.name}' at byte {tensor.start}, where byte {position} is next"
            raise UnreadableHeader(file=path, detail=detail)
        position += tensor.num_bytes
        if position > size and first_incomplete is None:
            first_incomplete = f"tensor '{tensor.name}'"
    if first_incomplete is not None:
        raise TruncatedShard(file=path, expected=position, got=size, tensor=first_incomplete)
    if position < size:
        detail = f"{size - position} bytes after the last tensor"
        raise UnreadableHeader(file=path, detail=detail)


def _merge(headers: Iterable[list[StoredTensor]]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for header in headers:
        for tensor in header:
            other = tensors.get(tensor.name)
            if other is not None:
                raise DuplicateTensor(name=tensor.name, first=other.file, second=tensor.file)
            tensors[tensor.name] = tensor
    return tensors


def _read_index(path: Path) -> dict[str, str]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnreadableShard(file=path, detail=error.strerror or type(error).__name__) from error
    except (ValueError, RecursionError) as error:
        raise UnreadableIndex(file=path, got=f"{type(error).__name__}: {error}") from error
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise UnreadableIndex(file=path, got="no weight_map")
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise UnreadableIndex(file=path, got=f"{shard!r} as the shard of '{name}'")
    for shard in set(weight_map.values()):
        # A shard is a file beside its index: a path could lead anywhere.
        if Path(shard).name != shard or shard in ("", ".."):
            raise UnreadableIndex(file=path, got=f"{shard!r} as a shard")
    return weight_map


def _compare_index(
    directory: Path, weight_map: dict[str, str], tensors: dict[str, StoredTensor]
) -> None:
    for name, tensor in tensors.items():
        if name not in weight_map:
            raise UnindexedTensor(file=tensor.file, name=name)
    files = {shard: str(directory / shard) for shard in set(weight_map.values())}
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].file != files[shard]:
            raise IndexedTensorAbsent(name=name, file=shard)


def _found(directory: Path) -> str:
    if not directory.is_dir():
        return "no such directory"
    shards = sorted(path.name for path in directory.glob("*.safetensors"))
    return f"{len(shards)} other shards without an index" if shards else "no weight file"


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    if not isinstance(value, list):
        return False
    # Set arithmetic, as a generator for each of 192,170 lists would take half of the time.
    return {type(item) for item in value} <= {int} and min(value, default=0) >= 0
