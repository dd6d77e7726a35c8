"""Errors of the passes."""

from graphs.errors import EngineError


class PassError(EngineError):
    """Base of the errors of the passes."""


class UnknownPass(PassError):
    """A pass name that is not in the pipeline."""

    message = "UnknownPass: no pass is named '{name}'; the pipeline is: {known}."
    exit_code = 2


class NoProvider(PassError):
    """Ops that no provider takes on this device."""

    message = (
        "NoProvider: unit '{unit}' has ops that nothing here can run: {ops}. "
        "Choose another backend, or enable the reference provider."
    )
    exit_code = 3


class PassOrder(PassError):
    """A pass that stands before one it must follow."""

    message = "PassOrder: '{name}' must run after '{after}'; fix the order in passes/pipeline.py."
