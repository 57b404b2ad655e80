"""Every error as the OpenAI envelope: {"error": {message, type, param, code}}, small whatever the request was."""

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from framework import EngineDead, FrameworkError, InvalidRequest, Rejected
from framework.log import get_logger

log = get_logger(__name__)

MAX_PROBLEMS = 10
MAX_INPUT = 200
MAX_MESSAGE = 2000


class UnknownModel(FrameworkError):
    """HTTP 404."""


class BodyTooLarge(FrameworkError):
    """HTTP 413."""


def status_of(error: BaseException) -> int:
    """The HTTP status of an error."""
    match error:
        case Rejected():
            return error.status
        case HTTPException():
            return error.status_code
        case InvalidRequest():
            return 400
        case UnknownModel():
            return 404
        case BodyTooLarge():
            return 413
        case EngineDead():
            return 503
    return 500


def envelope(error: BaseException) -> dict[str, Any]:
    """The body for an error. Of errors that are not meant for users nothing but their status is told."""
    status = status_of(error)
    if isinstance(error, HTTPException):
        message = str(error.detail)
    else:
        message = (
            str(error) if isinstance(error, FrameworkError) else "internal error; the server's log has the details"
        )
    param = error.field if isinstance(error, InvalidRequest) else "model" if isinstance(error, UnknownModel) else None
    return _envelope(status, message, param)


def _envelope(status: int, message: str, param: str | None) -> dict[str, Any]:
    kind = HTTPStatus(status).phrase.replace(" ", "").replace("-", "")
    message = _brief(message, MAX_MESSAGE).encode("utf-8", "replace").decode()
    return {"error": {"message": message, "type": kind.removesuffix("Error") + "Error", "param": param, "code": status}}


def _brief(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _respond(status: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


async def _on_error(request: Request, error: Exception) -> Response:
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if isinstance(error, Rejected) and error.retry_after is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after))
    return _respond(status_of(error), envelope(error), headers)


async def _on_validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems, first = [], None
    for problem in error.errors()[:MAX_PROBLEMS]:
        where = ".".join(str(part) for part in problem["loc"] if part != "body")
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "json_invalid":
            where, message = "", f"the body is not valid JSON: {problem['ctx']['error']} at character {where}"
        elif problem["type"] not in ("missing", "value_error"):
            message += f", got {_brief(repr(problem['input']), MAX_INPUT)}"
        first = first or where or None
        problems.append(f"{_brief(where, MAX_INPUT)}: {message}" if where else message)
    return _respond(400, _envelope(400, "; ".join(problems), _brief(first, MAX_INPUT) if first else None))


def install(app: FastAPI) -> None:
    """Make `app` answer every error in the envelope. Unexpected ones are logged with their traceback by the server."""
    app.add_exception_handler(RequestValidationError, _on_validation)
    for kind in (FrameworkError, HTTPException, Exception):
        app.add_exception_handler(kind, _on_error)
