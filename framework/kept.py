"""Weights that take long to convert, kept in the user's cache folder and memory-mapped from the second start on.

An entry is one file, named by all that its contents depend on: each tensor beginning at a multiple of 64 bytes, and the
name again at the end. It is made beside its place, written out, and renamed into it, under a lock; one that is not of
the right size or has no name at the end counts as absent. Nothing is ever deleted.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
import torch

from .log import get_logger
from .machine import cache_folder, size
from .pages import zeros

LEAST = 1 << 18
"""Values of a weight that is worth a file."""
SPARE = 1 << 30
"""Bytes that are left free on the disk."""

Shape = tuple[tuple[int, ...], torch.dtype]
_log = get_logger(__name__)
_warned: set[Path] = set()


def kept(
    parts: Iterable[str], sources: Sequence[Path], shapes: Sequence[Shape], make: Callable[[list[torch.Tensor]], None]
) -> list[torch.Tensor]:
    """The tensors that `make` fills in, which are zero before: mapped, if they were made and kept already. May be
    written to; the entry stays what it is.

    parts: what they depend on, besides their shapes and types, and the code here and in the files `sources`. Where they
    cannot be kept, a warning says so, once for each folder.
    """
    layout = [f"{list(shape)} {dtype}" for shape, dtype in shapes]
    name = hashlib.sha256("\n".join([_code(*sources), *parts, *layout]).encode()).hexdigest()
    path = cache_folder("weights") / name
    found = _map(path, shapes)
    if found is None:
        found = [zeros(shape, dtype) for shape, dtype in shapes]
        make(found)
        try:
            _write(path, found)
        except OSError as error:  # slower next time, and no worse
            if path.parent not in _warned:
                _warned.add(path.parent)
                _log.warning("converted weights are not kept", folder=str(path.parent), reason=str(error))
        else:
            found = _map(path, shapes) or found  # pages that the system can drop and read again
    return found


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """While it holds, no other process that asks for the same path goes on."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@cache
def _code(*sources: Path) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in (Path(__file__), *sources))).hexdigest()


def _places(shapes: Sequence[Shape]) -> list[int]:
    """Where each tensor begins, and at last where all end."""
    places = [0]
    for shape, dtype in shapes:
        places.append(places[-1] + -(-prod(shape) * dtype.itemsize // 64) * 64)
    return places


def _map(path: Path, shapes: Sequence[Shape]) -> list[torch.Tensor] | None:
    places = _places(shapes)
    try:
        data = np.memmap(path, mode="c")  # torch has no read-only tensors; nothing is written
    except (OSError, ValueError):  # absent or empty
        return None
    if len(data) != places[-1] + 64 or data[-64:].tobytes() != path.name.encode():
        return None
    return [
        torch.from_numpy(data[at : at + prod(shape) * dtype.itemsize]).view(dtype).view(shape)
        for (shape, dtype), at in zip(shapes, places[:-1], strict=True)
    ]


def _write(path: Path, tensors: Sequence[torch.Tensor]) -> None:
    shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    places = _places(shapes)
    path.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(path.parent).free
    if free < places[-1] + SPARE:
        raise OSError(f"{size(free)} are free on the disk, and {size(SPARE)} shall remain")
    with locked(path.with_name("lock")):
        if _map(path, shapes) is not None:  # another process made it meanwhile
            return
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix="making-", delete=False) as file:
            try:
                for tensor, at in zip(tensors, places[:-1], strict=True):
                    file.seek(at)
                    file.write(tensor.view(torch.uint8).numpy().data)
                file.seek(places[-1])
                file.write(path.name.encode())
                file.flush()
                os.fsync(file.fileno())
                Path(file.name).replace(path)
            except BaseException:
                Path(file.name).unlink()
                raise
