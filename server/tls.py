"""TLS: the certificate and its key, checked before anything is loaded."""

from __future__ import annotations

import ssl
from pathlib import Path

from framework import ConfigError
from framework.settings import Settings


def check_tls(settings: Settings) -> None:
    """Raise `ConfigError` unless the server can speak TLS as the settings say, or is not to."""
    certificate, key = settings.ssl_certfile, settings.ssl_keyfile
    if certificate is None:
        if key is not None:
            raise ConfigError("--ssl-keyfile: needs --ssl-certfile, the certificate that the key belongs to")
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _readable("--ssl-certfile", certificate)
    if key is not None:
        _readable("--ssl-keyfile", key)
    both = "--ssl-certfile" if key is None else "--ssl-certfile, --ssl-keyfile"
    asked = False

    def password() -> str:
        nonlocal asked
        asked = True
        return ""

    try:
        context.load_cert_chain(certificate, key, password)
    except (ssl.SSLError, ValueError) as error:
        if asked:
            why = "the key is protected by a password; write it without one, readable by the server only"
        elif getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            why = "the key is not that of the certificate"
        elif key is None:
            why = f"{certificate} must hold a certificate and its key in PEM; a key of its own is --ssl-keyfile"
        else:
            why = f"{certificate} must hold a certificate and {key} its key, both in PEM"
        raise ConfigError(f"{both}: {why}") from None


def _readable(flag: str, path: Path) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{flag}: cannot read {path}: {error.strerror}") from None
