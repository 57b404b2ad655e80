"""API keys: who may use the server, and as which tenant."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from fastapi import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from framework import ConfigError
from framework.settings import API_KEY, variable

from .errors import Problem, Spellings
from .limits import MAX_KEY, MAX_KEY_FILE, MAX_USER

OPEN = frozenset({"/health", "/ping", "/ready", "/version", "/metrics"})
"""Paths that need no key: what asks for them are probes and gateways, which have none."""
_UNKNOWN = "this API key is not known here"
_MISSING = "an API key is needed: send Authorization: Bearer KEY"
_CHALLENGE = {"WWW-Authenticate": "Bearer"}
_NAME = re.compile(rf"[\w.@-]{{1,{MAX_USER}}}")
_KEY = re.compile(rf"[\x21-\x7e]{{1,{MAX_KEY}}}")


class Keys:
    """The keys that are accepted, as digests. Falsy if there are none: then everybody is."""

    def __init__(self, keys: Iterable[tuple[str, str]] = ()) -> None:
        """`keys`: pairs of (name, key)."""
        self._digests = [(name, _digest(key.encode())) for name, key in keys]
        self.shown = ""
        """For a first request: the variable that a key is in, or where else to find one."""

    def __bool__(self) -> bool:
        return bool(self._digests)

    def name(self, key: bytes) -> str | None:
        """Whose key this is; None if it is nobody's. How long that takes depends on no key's content."""
        digest, found = _digest(key), None
        for name, known in self._digests:
            if hmac.compare_digest(digest, known):
                found = name
        return found

    @classmethod
    def load(cls, file: Path | None) -> Keys:
        """The keys of `file` and of the environment, from which the key is taken: child processes do not see it.

        Raises `ConfigError`, which names the line but shows no key.
        """
        found: dict[str, str] = {}
        sources: dict[str, str] = {}
        for where, name, key in (*_of_file(file), *_of_environment()):
            fault = _fault(name, key)
            if fault:
                raise ConfigError(f"{where}: {fault}")
            if name in found:
                raise ConfigError(f"{where}: the name {name!r} is that of {sources[name]} too; give each key its own")
            same = next((other for other, known in found.items() if known == key), None)
            if same is not None:
                raise ConfigError(f"{where}: the key is that of {sources[same]} too; give each name its own")
            found[name], sources[name] = key, where
        keys = cls(found.items())
        if found:
            keys.shown = f"${variable(API_KEY)}" if variable(API_KEY) in sources.values() else f"<a key of {file}>"
        return keys


def _of_file(file: Path | None) -> Iterator[tuple[str, str, str]]:
    """(where it stands, name, key) of each line."""
    if file is None:
        return
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_KEY_FILE + 1)
        if len(data) > MAX_KEY_FILE:
            raise ConfigError(f"--api-key-file: {file} is larger than {MAX_KEY_FILE} bytes")
        lines = data.decode("utf-8-sig").splitlines()
    except OSError as error:
        raise ConfigError(f"--api-key-file: cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--api-key-file: {file} is not UTF-8 text") from None
    empty = True
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        where = f"--api-key-file: line {number} of {file}"
        name, separator, key = line.partition(":")
        if not separator:
            raise ConfigError(f"{where}: write it as name:key")
        empty = False
        yield where, name.strip(), key.strip()
    if empty:
        raise ConfigError(f"--api-key-file: {file} holds no key; write lines such as name:key, or leave the flag out")


def _of_environment() -> Iterator[tuple[str, str, str]]:
    where = variable(API_KEY)
    key = os.environ.pop(where, None)
    if key is not None:
        yield where, "default", key.strip()


def _fault(name: str, key: str) -> str | None:
    if not _NAME.fullmatch(name):
        return f"the name must be 1 to {MAX_USER} letters, digits or _ . @ -"
    if not key:
        return "the key is empty; give one, or leave it out altogether"
    if not _KEY.fullmatch(key):
        return f"the key must be 1 to {MAX_KEY} characters of ASCII, without spaces"
    return None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Authentication:
    """Wraps the application, routes of plugins included: who brings no key gets a 401, and the others their name as
    `tenant` in the request's state."""

    def __init__(self, app: ASGIApp, keys: Keys, spelling: Spellings) -> None:
        self._app = app
        self._keys = keys
        self._spelling = spelling

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and scope["path"] not in OPEN:
            key = bearer(scope)
            name = None if key is None else self._keys.name(key)
            if name is None:
                message = _UNKNOWN if key is not None else _MISSING
                status, body = self._spelling(scope["path"])(Problem(401, message))
                answer = Response(msgspec.json.encode(body), status, _CHALLENGE, "application/json")
                await answer(scope, receive, send)
                return
            scope.setdefault("state", {})["tenant"] = name
        await self._app(scope, receive, send)


def bearer(scope: Scope) -> bytes | None:
    """The API key that a request brings: `Authorization: Bearer KEY`."""
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
    key = key.strip()
    return key if scheme.lower() == b"bearer" and key else None


def caller(request: Request) -> str:
    """Who asks, where the body does not say: the name of the API key; where the server knows no keys, a digest of
    it, so that the key itself goes nowhere."""
    tenant: str | None = getattr(request.state, "tenant", None)
    if tenant is not None:
        return tenant
    key = bearer(request.scope)
    return "" if key is None else "key-" + hashlib.blake2b(key, digest_size=8).hexdigest()
