"""Every error as a status, a message and the field at fault; how that is spelled is the dialect's."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from framework import EngineDead, FrameworkError, InvalidRequest, Rejected
from framework.errors import brief, quoted

from .limits import MAX_INPUT, MAX_MESSAGE, MAX_PROBLEMS, RETRY_AFTER

GONE = "the client went away"
_RULES = {
    "missing": "is required",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "finite_number": "must be a finite number",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
    "string_too_short": "must have a length of at least {min_length}",
    "string_too_long": "must have a length of at most {max_length}",
    "string_unicode": "must be valid Unicode, without lone surrogates",
    "too_short": "must have a length of at least {min_length}",
    "too_long": "must have a length of at most {max_length}",
    "literal_error": "must be {expected}",
}
"""Pydantic's error types in the words of JSON: all that the bodies of requests can come to, but for "value_error"."""


_FOLDERS = re.compile(r"(?<![\w.:/\\-])(?:~|\.{1,2}|[A-Za-z]:)?[/\\](?:[^\s/\\'\"(),:;]+[/\\])*")
"""Folders of an absolute or relative path: `/a/b/` of `/a/b/c.py`."""


class UnknownModel(FrameworkError):
    """HTTP 404."""


def unknown_model(name: str, names: Sequence[str]) -> UnknownModel:
    return UnknownModel(f"model: {quoted(name, MAX_INPUT)} is not served here; available: {', '.join(names)}")


class Forbidden(FrameworkError):
    """HTTP 403. `field` is the request field at fault."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class Problem(NamedTuple):
    """What a client is told of an error: small whatever the request was, and valid Unicode. `field` is the request
    field at fault."""

    status: int
    message: str
    field: str | None = None
    headers: Mapping[str, str] = {}


Spelling = Callable[[Problem], tuple[int, Any]]
"""How a dialect says it: (HTTP status, what becomes the JSON body or the data of an event)."""
Spellings = Callable[[str], Spelling]
"""The dialect of those who ask for a path, whatever becomes of their request."""


def problem(error: BaseException) -> Problem:
    """Of errors that are not meant for users nothing but their status is told."""
    message, field, headers = str(error), None, {}
    match error:
        case RequestValidationError():
            status = 400
            message, field = _invalid(error)
        case HTTPException():
            status, message, headers = error.status_code, str(error.detail), dict(error.headers or {})
        case Rejected():
            status = error.status if 400 <= error.status <= 599 else 500  # it may be a plugin's
            if error.retry_after is not None and 0 <= error.retry_after < math.inf:
                headers["Retry-After"] = str(math.ceil(error.retry_after))
        case InvalidRequest():
            status, field = 400, error.field or None
        case Forbidden():
            status, field = 403, error.field
        case UnknownModel():
            status, field = 404, "model"
        case ClientDisconnect():
            status, message = 499, GONE
        case EngineDead():
            status, headers = 503, {"Retry-After": str(RETRY_AFTER)}
        case FrameworkError():
            status = 500
        case _:
            status, message = 500, "internal error; the server's log has the details"
            headers["Connection"] = "close"  # as uvicorn does: a client must not send its next request there
    if status >= 500:
        message = _outside(message)
    return Problem(status, brief(message, MAX_MESSAGE).encode("utf-8", "replace").decode(), field, headers)


def _outside(message: str) -> str:
    """What failed in here, as far as it is a client's business: the first line, without folders."""
    return _FOLDERS.sub("", (message.strip().splitlines() or [""])[0])


def _invalid(error: RequestValidationError) -> tuple[str, str | None]:
    problems, first = [], None
    for found in error.errors()[:MAX_PROBLEMS]:
        where = brief(".".join(str(part) for part in found["loc"] if part != "body"), MAX_INPUT)
        message = re.sub("^Input should", "must", found["msg"].removeprefix("Value error, "))  # of plugins' bodies
        if found["type"] in _RULES:
            message = _RULES[found["type"]].format(**found.get("ctx", {})).replace("'", '"')
        if found["type"] not in ("missing", "value_error"):
            message += f", got {quoted(found['input'], MAX_INPUT)}"
        first = first or where or None
        problems.append(f"{where}: {message}" if where else message)
    return "; ".join(problems), first


def install(app: FastAPI, default: Spelling) -> None:
    """Make `app` answer every error as `request.state.spell` spells it (see `JsonRoute`), or else as `default` does.

    Unexpected ones are logged with their traceback by the server.
    """

    async def answer(request: Request, error: Exception) -> Response:
        found = problem(error)
        spell: Spelling = getattr(request.state, "spell", default)
        status, body = spell(found)
        return Response(msgspec.json.encode(body), status, found.headers, "application/json")

    for kind in (RequestValidationError, FrameworkError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, answer)
