"""The `@op` decorator: a plain-PyTorch function becomes a named op that graphs hold as one node.

The decorated function is the op's reference body. Its schema is read from the annotations, its
output shapes
come from a shape function, and it is registered through `torch.library.Library`: calling a
decorator-made
custom op costs about eight times as much and seconds on first use. Providers of `backends/`
implement the same
schema; tests, passes and documentation all read the one `Op` object.
"""

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from graphs.errors import UnknownOp

NAMESPACE = "flashreplay"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")  # noqa: TOR901 - lives as long as the process

OPS: dict[str, "Op"] = {}


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest allowed difference of a provider from the reference body.

    Args:
        atol: absolute, in units of the output.
        rtol: relative to the reference.
    """

    atol: float
    rtol: float


EXACT = Tolerance(0.0, 0.0)
FP32_CLOSE = Tolerance(1e-5, 1e-5)


@dataclass(frozen=True, slots=True)
class Op:
    """One named op; call it like the function it was made from.

    Args:
        name: name in the `flashreplay` namespace.
        schema: torch.library schema without the name.
        reference: the plain-PyTorch body.
        shape: same arguments as the body, returns empty tensors of the output shapes.
        samples: seed -> positional arguments, valid and non-trivial; tests use it.
        mutates: names of the arguments the body writes in place.
        tolerance: allowed difference of other implementations.
        version: goes into graph keys; raise it when the meaning changes.
    """

    name: str
    schema: str
    reference: Callable[..., Any]
    shape: Callable[..., Any]
    samples: Callable[[int], tuple[Any, ...]]
    mutates: tuple[str, ...]
    tolerance: Tolerance
    version: int
    overload: Any = field(repr=False)

    def __call__(self, *args: Any) -> Any:
        """Call the op: one dispatcher entry, whatever provides it."""
        return self.overload(*args)

    @property
    def source_hash(self) -> str:
        """Hash of the body's source text (hex, 12 digits)."""
        return hashlib.sha256(inspect.getsource(self.reference).encode()).hexdigest()[:12]


def op(
    *,
    shape: Callable[..., Any],
    samples: Callable[[int], tuple[Any, ...]],
    mutates: tuple[str, ...] = (),
    tolerance: Tolerance = FP32_CLOSE,
    version: int = 1,
) -> Callable[[Callable[..., Any]], Op]:
    """Register the decorated function as a named op and return the callable `Op`.

    Ops return fresh tensors, never views of their inputs, and write only arguments listed in
    `mutates`.
    """

    def register(body: Callable[..., Any]) -> Op:
        name = body.__name__
        schema = torch.library.infer_schema(body, mutates_args=mutates)
        _LIBRARY.define(name + schema)
        _LIBRARY.impl(name, body, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", shape, lib=_LIBRARY)
        overload = getattr(getattr(torch.ops, NAMESPACE), name).default
        OPS[name] = Op(name, schema, body, shape, samples, mutates, tolerance, version, overload)
        return OPS[name]

    return register


def find_op(name: str) -> Op:
    """Return the op of that name.

    Raises:
        UnknownOp: nothing of that name is registered.
    """
    if name not in OPS:
        raise UnknownOp(name=name, known=", ".join(sorted(OPS)))
    return OPS[name]


def op_of_target(target: Any) -> Op | None:
    """Return the op that an fx node's target calls, or None for any other target."""
    if isinstance(target, torch._ops.OpOverload) and target.namespace == NAMESPACE:
        return OPS.get(target._opname)
    return None
