"""A checkpoint seen through its headers: names, types and shapes checked against the config.

`Checkpoint.open` reads headers only, `validate` compares them with the name table of
`model.weights`, and `model.load` then reads the data. Each tensor decides for itself whether it is
quantised, so a plain BF16 or F32 checkpoint and the official one take the same path.
"""

import difflib
import re
from dataclasses import dataclass, field
from pathlib import Path

from model.config import ModelConfig
from model.errors import (
    AmbiguousPrefix,
    MissingScale,
    MissingTensor,
    MixedExperts,
    UnexpectedScale,
    UnknownTensor,
    WrongDtype,
    WrongShape,
)
from model.shards import StoredTensor, paused_collector, read_tensors
from model.weights import SCALE_DTYPE, TensorEntry, stacked_name, tensor_table

PREFIX = "model."
_PLAIN_DTYPES = ("BF16", "F32")


@dataclass(slots=True)
class GroupSize:
    """How much one group of tensors holds in the files.

    Args:
        num_tensors: tensors, scales counted.
        num_bytes: bytes in the files.
    """

    num_tensors: int = 0
    num_bytes: int = 0

    def add(self, stored: StoredTensor) -> None:
        """Count one more stored tensor."""
        self.num_tensors += 1
        self.num_bytes += stored.num_bytes


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """What a validated checkpoint holds; the numbers are of the files, not of memory after loading.

    Args:
        num_tensors: all tensors, scales and those of unused features counted.
        num_bytes: bytes of their data.
        by_group: sizes by `TensorEntry.group`, in file formats.
        by_feature: sizes by `TensorEntry.feature`.
    """

    num_tensors: int
    num_bytes: int
    by_group: dict[str, GroupSize]
    by_feature: dict[str, GroupSize]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a checkpoint directory and where they lie.

    Args:
        directory: the checkpoint directory.
        tensors: by name without the optional `model.` prefix.
    """

    directory: Path
    tensors: dict[str, StoredTensor] = field(repr=False)

    @classmethod
    def open(cls, directory: str | Path) -> "Checkpoint":
        """Read the headers of `model.safetensors`, or of the shards that the index names.

        Raises:
            CheckpointError: a subclass for each kind of fault; see `model.errors`.
        """
        path = Path(directory)
        with paused_collector():
            return cls(path, _strip_prefix(read_tensors(path)))

    def validate(self, config: ModelConfig) -> CheckpointSummary:
        """Check that no tensor is unknown or missing and that each has the right form.

        Tensors of features that this engine does not run (draft module, image tower) are checked
        and counted too.

        Raises:
            UnknownTensor, MissingTensor, MissingScale, UnexpectedScale, WrongDtype, WrongShape,
            MixedExperts.
        """
        with paused_collector():
            table = tensor_table(config)
            extra = _optional_entries(config, table, self.tensors)
            self._refuse_unknown(table, extra)
            self._refuse_missing(table)
            is_plain = config.quantization_config is None
            by_group: dict[str, GroupSize] = {}
            by_feature: dict[str, GroupSize] = {}
            for entry in (*table.values(), *extra.values()):
                group = by_group.setdefault(entry.group, GroupSize())
                feature = by_feature.setdefault(entry.feature, GroupSize())
                for stored in self._check_entry(entry, is_plain):
                    group.add(stored)
                    feature.add(stored)
            self._check_experts(table)
        num_bytes = sum(size.num_bytes for size in by_group.values())
        return CheckpointSummary(len(self.tensors), num_bytes, by_group, by_feature)

    def _refuse_unknown(self, table: dict[str, TensorEntry], extra: dict[str, TensorEntry]) -> None:
        known = {entry.scale_name for entry in table.values() if entry.is_quantized}
        unknown = [
            name
            for name in self.tensors
            if name not in table and name not in known and name not in extra
        ]
        if unknown:
            stored = self.tensors[unknown[0]]
            raise UnknownTensor(
                file=stored.file,
                name=stored.name,
                count=len(unknown),
                nearest=_nearest(unknown[0], {*table, *known}),
            )

    def _refuse_missing(self, table: dict[str, TensorEntry]) -> None:
        missing = [entry for entry in table.values() if entry.name not in self.tensors]
        if missing:
            names = ", ".join(f"'{entry.name}'" for entry in missing[:3])
            raise MissingTensor(
                directory=self.directory,
                total=len(table),
                count=len(missing),
                names=names if len(missing) <= 3 else f"{names}, ...",
                features=", ".join(sorted({entry.feature for entry in missing})),
            )

    def _check_entry(self, entry: TensorEntry, is_plain: bool) -> list[StoredTensor]:
        """Check one weight and its scale, and return what is stored for it."""
        weight = self.tensors[entry.name]
        scale = self.tensors.get(entry.scale_name) if entry.is_quantized else None
        if not entry.is_quantized:
            # bf16 would cost the mixes 1e-2, so a quantised checkpoint must keep its f32 tensors;
            # a plain one may be stored in one type throughout.
            dtypes = ("F32",) if entry.kind == "f32" and not is_plain else _PLAIN_DTYPES
            _check_form(weight, dtypes, entry.shape)
            return [weight]
        if weight.dtype in _PLAIN_DTYPES:
            if scale is not None:
                raise UnexpectedScale(
                    file=scale.file,
                    scale=scale.name,
                    weight=weight.name,
                    dtype=weight.dtype,
                    expected=entry.storage_dtype,
                )
            _check_form(weight, _PLAIN_DTYPES, entry.shape)
            return [weight]
        _check_form(weight, (entry.storage_dtype, *_PLAIN_DTYPES), entry.storage_shape)
        if scale is None:
            raise MissingScale(
                file=weight.file,
                weight=weight.name,
                dtype=weight.dtype,
                scale=weight.name.removesuffix(entry.name) + entry.scale_name,
                shape=list(entry.scale_shape),
            )
        _check_form(scale, (SCALE_DTYPE,), entry.scale_shape)
        return [weight, scale]

    def _check_experts(self, table: dict[str, TensorEntry]) -> None:
        dtypes: dict[str, str] = {}
        for name, entry in table.items():
            if entry.kind != "fp4":
                continue
            stack = stacked_name(name)
            stored = self.tensors[name]
            if stack is not None and dtypes.setdefault(stack[0], stored.dtype) != stored.dtype:
                raise MixedExperts(
                    file=stored.file, name=stored.name, got=stored.dtype, expected=dtypes[stack[0]]
                )


def _strip_prefix(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    stripped: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        bare = name.removeprefix(PREFIX)
        other = stripped.get(bare)
        if other is not None:
            plain, prefixed = (other, tensor) if other.name == bare else (tensor, other)
            raise AmbiguousPrefix(name=bare, first=plain.file, second=prefixed.file)
        stripped[bare] = tensor
    return stripped


def _optional_entries(
    config: ModelConfig, table: dict[str, TensorEntry], tensors: dict[str, StoredTensor]
) -> dict[str, TensorEntry]:
    """Image gate biases in a text-only checkpoint: nothing reads them, and files may keep them."""
    if config.vision_config is not None:
        return {}
    return {
        name: TensorEntry(name, "vision", "vision", "f32", table[name[:-3]].shape)
        for name in tensors
        if name.endswith(".gate.bias_vl") and name[:-3] in table
    }


def _check_form(stored: StoredTensor, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    if stored.dtype not in dtypes:
        expected = " or ".join(dtypes)
        raise WrongDtype(file=stored.file, name=stored.name, expected=expected, got=stored.dtype)
    if stored.shape != shape:
        raise WrongShape(
            file=stored.file,
            name=stored.name,
            dtype=stored.dtype,
            expected=list(shape),
            got=list(stored.shape),
        )


def _nearest(name: str, known: set[str]) -> str:
    """Describe the nearest known names, numbers masked: 384 experts would crowd out the rest."""
    pattern = _mask(name)
    patterns = sorted({_mask(other) for other in known})
    if pattern in patterns:
        return f"whose layer and expert numbers for '{pattern}' are lower"
    nearest = difflib.get_close_matches(pattern, patterns, n=3, cutoff=0.5)
    return f"nearest: {', '.join(nearest) or 'none'}"


def _mask(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "N", name)
