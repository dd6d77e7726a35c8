"""One registry of op implementations: an op has its reference body and any number of providers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from backends.capability import Capability
from graphs.op import find_op

REFERENCE = "reference"

Refusal = str  # why a provider does not take a call, for the reader of an error or of `explain`


@dataclass(frozen=True, slots=True)
class Provider:
    """An implementation of an op.

    Args:
        op: name of the op.
        name: name of the provider, unique per op.
        priority: the highest that accepts wins; the reference has 0.
        target: what a graph node calls, same schema as the op.
        available: refusal for this device, or None.
        supports: refusal for this call (the node carries shapes and dtypes), or None.
    """

    op: str
    name: str
    priority: int
    target: Callable[..., Any]
    available: Callable[[Capability], Refusal | None]
    supports: Callable[[fx.Node], Refusal | None]


_PROVIDERS: dict[str, list[Provider]] = {}


def register_provider(provider: Provider) -> None:
    """Add a provider; the op must exist."""
    find_op(provider.op)
    _PROVIDERS.setdefault(provider.op, []).append(provider)


def candidates(op_name: str) -> list[Provider]:
    """Return the providers of an op, best first, the reference body last."""
    reference = Provider(
        op_name, REFERENCE, 0, find_op(op_name).overload, lambda _: None, lambda _: None
    )
    known = _PROVIDERS.get(op_name, [])
    return sorted([*known, reference], key=lambda p: -p.priority)


def choose(
    op_name: str, node: fx.Node, capability: Capability
) -> tuple[Provider | None, list[str]]:
    """Return the best provider of a call, and why each better one refused."""
    refusals: list[str] = []
    for provider in candidates(op_name):
        reason = provider.available(capability) or provider.supports(node)
        if reason is None:
            return provider, refusals
        refusals.append(f"{provider.name}: {reason}")
    return None, refusals
