"""Errors that reach a user. Each says which field is wrong and what to do about it."""

import json
from typing import Any


class FrameworkError(Exception):
    """Base of every error that is the user's to fix: shown as one line, without a traceback."""


class ConfigError(FrameworkError):
    """A setting is wrong or settings contradict each other. Ends start-up with exit code 2."""


class PluginError(FrameworkError):
    """A plugin cannot be loaded, raised, or breaks the contract. The message names it; so does `plugin`."""

    def __init__(self, message: str, plugin: str = "") -> None:
        super().__init__(message)
        self.plugin = plugin


class ModelError(FrameworkError):
    """A checkpoint is missing, incomplete or of an unsupported kind."""


class InvalidRequest(FrameworkError):
    """A request that can never be served as it stands: HTTP 400.

    `field` is the request field at fault, as the client spells it.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class Rejected(FrameworkError):
    """The engine refused a request (`Reject` of an `accept` hook, or a limit of the core)."""

    def __init__(self, reason: str, status: int = 429, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.retry_after = retry_after


class EngineDead(FrameworkError):
    """The engine process ended; nothing can be generated until it is restarted: HTTP 503."""


def brief(text: str, limit: int) -> str:
    """`text`, cut to `limit` characters: what a client or a user sent may be of any size."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def one_line(error: BaseException, limit: int = 200) -> str:
    """What `error` says, for a message of ours."""
    return brief(" ".join(str(error).split()), limit) or type(error).__name__


def quoted(value: Any, limit: int = 80) -> str:
    """A value that a client or a user sent, in the words of JSON, cut to `limit` characters."""
    try:
        return brief(json.dumps(value, ensure_ascii=False), limit)
    except (TypeError, ValueError, RecursionError):  # of Python's own, or nested too deeply
        return f"a value of type {type(value).__name__}"
