"""Read and write safetensors files byte for byte, so that tests can damage them in any way."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RawTensor:
    """A stored tensor: dtype string, shape and bytes."""

    dtype: str
    shape: list[int]
    data: bytes


def read_raw(path: Path) -> dict[str, RawTensor]:
    """Read all tensors of a file in file order."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    return {
        name: RawTensor(
            info["dtype"],
            info["shape"],
            content[start + info["data_offsets"][0] : start + info["data_offsets"][1]],
        )
        for name, info in sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    }


def write_raw(path: Path, tensors: dict[str, RawTensor]) -> None:
    """Write tensors to a file in the order given."""
    header: dict[str, Any] = {}
    position = 0
    for name, tensor in tensors.items():
        end = position + len(tensor.data)
        header[name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [position, end],
        }
        position = end
    write_header(path, json.dumps(header), b"".join(tensor.data for tensor in tensors.values()))


def write_header(path: Path, header: str, data: bytes = b"") -> None:
    """Write a file with any text as its header."""
    raw = header.encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def write_shards(directory: Path, tensors: dict[str, RawTensor], num_shards: int) -> list[Path]:
    """Split tensors over shards, write them with their index and return the shard paths."""
    names = list(tensors)
    paths = []
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {key: tensors[key] for key in names[shard::num_shards]}
        write_raw(directory / name, part)
        weight_map |= dict.fromkeys(part, name)
        paths.append(directory / name)
    total = sum(len(tensor.data) for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return paths
