"""Tracing: a pure function of named tensors becomes a static torch.fx graph of named ops.

The front end is `make_fx` over fake inputs: no guards, no dynamic shapes, mutations kept in place.
Weights, caches
and step inputs are placeholders, so that one graph serves every layer of its family.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from graphs.errors import EngineError, TraceError

FamilyFunction = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, dtype and device type of a contiguous tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str = "cpu"

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        """Return the spec of a tensor, real or fake."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device.type)

    def empty(self) -> Tensor:
        """Allocate a tensor of this spec (fake inside a FakeTensorMode)."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    @property
    def num_bytes(self) -> int:
        """Bytes of a contiguous tensor."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class TracedUnit:
    """A family at one bucket: a flat graph with named inputs and outputs.

    Args:
        name: family name.
        graph: placeholders in the order of `inputs`, one output tuple in the order of `outputs`.
        inputs, outputs: local name -> spec, ordered.
        mutated: local names of the inputs that the graph writes.
    """

    name: str
    graph: fx.GraphModule
    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]
    mutated: tuple[str, ...]


class _Recorder(Mapping[str, Tensor]):
    """Hands out fake tensors and remembers which names were asked for, in order."""

    def __init__(self, resolve: Callable[[str], TensorSpec | None]) -> None:
        self._resolve = resolve
        self.asked: dict[str, TensorSpec] = {}
        self._tensors: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._tensors:
            spec = self._resolve(name)
            if spec is None:
                raise KeyError(name)
            self.asked[name] = spec
            self._tensors[name] = spec.empty()
        return self._tensors[name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._resolve(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self.asked)

    def __len__(self) -> int:
        return len(self.asked)


def record_inputs(
    function: FamilyFunction, resolve: Callable[[str], TensorSpec | None]
) -> dict[str, TensorSpec]:
    """Run a family function on fake tensors and return the inputs it asked for, in order.

    Args:
        function: named tensors -> named tensors.
        resolve: local name -> spec, or None for a name that does not exist here.
    """
    recorder = _Recorder(resolve)
    with FakeTensorMode():
        function(recorder)
    return recorder.asked


def trace_unit(
    name: str, function: FamilyFunction, inputs: Mapping[str, TensorSpec], bucket: str
) -> TracedUnit:
    """Trace a family function with static shapes.

    Args:
        name: family name, for messages.
        function: named tensors -> named tensors.
        inputs: specs of every tensor the function may use, ordered.
        bucket: for messages.
    Raises:
        TraceError: the body reads device data on the host, makes shapes that depend on data,
            returns an input or a
            view of one, or closes over a tensor.
    """
    names = list(inputs)
    output_names: list[str] = []

    def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
        made = function(dict(zip(names, tensors, strict=True)))
        output_names[:] = made
        return tuple(made.values())

    mode = FakeTensorMode()
    with mode:
        fakes = [spec.empty() for spec in inputs.values()]  # distinct storages: none may merge
    try:
        module = make_fx(flat, tracing_mode="fake")(*fakes)
    except EngineError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a body does wrong is reported with its family
        hint = "A family may not read tensor data on the host nor make shapes that depend on data."
        raise TraceError(family=name, bucket=bucket, detail=error, hint=hint) from error
    _name_placeholders(module, names)
    _check_closed(module, name, bucket)
    outputs = _output_specs(module, output_names)
    unit = TracedUnit(name, module, dict(inputs), outputs, _mutated_inputs(module, names))
    _check_outputs(unit, bucket)
    return unit


def identifier(name: str) -> str:
    """Turn a dotted tensor name into a Python identifier."""
    return re.sub(r"\W", "_", name)


def _name_placeholders(module: fx.GraphModule, names: Sequence[str]) -> None:
    placeholders = module.graph.find_nodes(op="placeholder")
    for node, name in zip(placeholders, names, strict=True):
        node._rename(identifier(name))
        node.target = node.name
    module.recompile()


def _check_closed(module: fx.GraphModule, family: str, bucket: str) -> None:
    constants = [str(n.target) for n in module.graph.find_nodes(op="get_attr")]
    if constants:
        detail = f"it closes over tensors ({', '.join(constants)})"
        hint = "Weights and constants must be inputs, so that the artefact does not contain them."
        raise TraceError(family=family, bucket=bucket, detail=detail, hint=hint)


def _output_specs(module: fx.GraphModule, names: Sequence[str]) -> dict[str, TensorSpec]:
    (output,) = module.graph.find_nodes(op="output")
    specs = {}
    for name, node in zip(names, output.args[0], strict=True):
        value = node.meta["val"]
        assert isinstance(value, FakeTensor)
        specs[name] = TensorSpec.of(value)
    return specs


def _mutated_inputs(module: fx.GraphModule, names: Sequence[str]) -> tuple[str, ...]:
    placeholders = dict(zip(module.graph.find_nodes(op="placeholder"), names, strict=True))
    written = []
    for node in module.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None:
            continue
        for argument, value in zip(schema.arguments, node.args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written.append(placeholders.get(value))
    return tuple(dict.fromkeys(name for name in written if name is not None))


def _check_outputs(unit: TracedUnit, bucket: str) -> None:
    (output,) = unit.graph.graph.find_nodes(op="output")
    nodes = list(output.args[0])
    placeholders = unit.graph.graph.find_nodes(op="placeholder")
    storages = [node.meta["val"].untyped_storage()._cdata for node in placeholders]
    for name, node in zip(unit.outputs, nodes, strict=True):
        storage = node.meta["val"].untyped_storage()._cdata
        if storage in storages:
            detail = f"output '{name}' shares memory with an input or another output"
            hint = "Return a fresh tensor: static buffers of a program must not overlap."
            raise TraceError(family=unit.name, bucket=bucket, detail=detail, hint=hint)
        storages.append(storage)
