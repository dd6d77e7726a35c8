"""Errors of the backends."""

from graphs.errors import EngineError


class BackendError(EngineError):
    """Base of the errors of the backends."""


class BackendUnavailable(BackendError):
    """The requested device is not there, or nothing here can run on it."""

    message = (
        "BackendUnavailable: backend '{name}' cannot be used: {reason}. Available: {available}."
    )
    exit_code = 3
