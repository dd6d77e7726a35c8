"""Base of every error a user can cause, and the errors of the graph layer.

An error class owns one message template with named fields. The message says what happened, where,
what was
expected and what was found, and what to do next. Packages above define their own catalogues on this
base.
"""

from typing import Any, ClassVar


class EngineError(Exception):
    """Base of all errors of this engine; subclasses fill in `message`.

    Args:
        **fields: values of the named fields of `message`; a missing one is a programming error.
    """

    message: ClassVar[str] = "{detail}"
    exit_code: ClassVar[int] = 1  # docs/cli.md lists the codes

    def __init__(self, **fields: Any) -> None:
        self.fields = fields
        super().__init__(self.message.format(**fields))

    def __reduce__(self) -> tuple[Any, ...]:
        # Worker processes send errors to their parent; the default protocol would drop the fields.
        return _rebuild, (type(self), self.fields)


def _rebuild(cls: type[EngineError], fields: dict[str, Any]) -> EngineError:
    return cls(**fields)


class GraphError(EngineError):
    """Base of the errors of the graph layer."""


class UnknownOp(GraphError):
    """An op name that no `@op` function has registered."""

    message = "UnknownOp: no op is named '{name}'; known ops: {known}. Import graphs.ops first."


class TraceError(GraphError):
    """A family function that cannot be traced into a static graph."""

    message = "TraceError: family '{family}' at bucket {bucket}: {detail}. {hint}"


class BindingError(GraphError):
    """A program that names a tensor nobody provides, or one of the wrong form."""

    message = "BindingError: {where}: tensor '{name}': expected {expected}, got {got}. {hint}"


class BucketTooSmall(GraphError):
    """A step that no bucket can hold."""

    message = (
        "BucketTooSmall: the step needs {needed} rows, the largest bucket holds {largest} "
        "({sizes}). "
        "Raise --max-num-batched-tokens, or let the scheduler split the step."
    )


class CompileError(GraphError):
    """A unit that the chosen kind cannot compile."""

    exit_code = 3

    message = "CompileError: {kind} failed on unit '{unit}': {detail}. {hint}"
