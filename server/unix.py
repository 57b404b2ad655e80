"""A Unix socket to listen on: made for whom the umask lets in, and gone at the end."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from framework import ConfigError


@contextmanager
def unix_socket(path: Path) -> Iterator[socket.socket]:
    """Listen at `path`, and remove it at the end. What a server left there that did not come to its end is replaced.

    Raises `ConfigError` naming --uds.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        _clear(path)
        try:
            listener.bind(str(path))
            own = path.stat()
            listener.listen(2048)
        except OSError as error:  # a path that is too long has no number
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(f"--uds: {path} was taken just now; another server is starting there") from None
            raise ConfigError(f"--uds: cannot listen at {path}: {error.strerror or error}") from None
        try:
            yield listener
        finally:
            with suppress(FileNotFoundError):
                now = path.stat()
                if (now.st_dev, now.st_ino) == (own.st_dev, own.st_ino):  # still ours
                    path.unlink()


def _clear(path: Path) -> None:
    """Remove a socket that nobody listens at."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"--uds: {path} exists and is no socket; remove it, or choose another path")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            probe.connect(str(path))
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        try:
            os.unlink(path)
        except OSError as error:
            raise ConfigError(f"--uds: cannot replace {path}: {error.strerror}") from None
        return
    except BlockingIOError:  # its queue is full
        pass
    except OSError as error:
        raise ConfigError(f"--uds: cannot listen at {path}: {error.strerror or error}") from None
    raise ConfigError(f"--uds: {path} is in use by another server; choose another path")
