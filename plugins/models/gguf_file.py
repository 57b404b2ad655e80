"""Reads the header of a GGUF file: metadata and where each tensor lies.

The gguf package's reader takes seconds over a vocabulary, since it makes a numpy array of every string; this one takes
a tenth of a second. The values of tensors are left to that package.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import re
import struct
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import gguf
import msgspec

from framework import ModelError
from framework.checkpoint import expect
from framework.log import get_logger
from framework.machine import cache_folder

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class TensorInfo(NamedTuple):
    """`shape` is in numpy's order, in elements; `offset` and `nbytes` locate the packed data in the file."""

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    offset: int
    nbytes: int


class GGUFFile:
    """`metadata` by key, `tensors` by name. Raises `ModelError` for a file that is not GGUF or is cut short."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._hash = ""
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelError(f"--model {path}: not a GGUF file (it does not begin with 'GGUF')")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                try:
                    self._read(_Cursor(data))
                except (struct.error, EOFError) as exc:
                    raise ModelError(f"--model {path}: the GGUF file is cut short; download it again") from exc
                except RecursionError:
                    raise ModelError(f"--model {path}: damaged GGUF file: arrays nested too deeply") from None

    def content_hash(self) -> str:
        """SHA-256 of the file, in hexadecimal. It is remembered in the user's cache folder for as long as the file's
        place, size and time of change stay."""
        if not self._hash:
            with self.path.open("rb") as file:
                stat = os.fstat(file.fileno())
                place = f"{self.path.resolve()} {stat.st_dev} {stat.st_ino} {stat.st_size}"
                mark = f"{place} {stat.st_mtime_ns} {stat.st_ctime_ns}"
                memo = cache_folder("hashes") / hashlib.sha256(mark.encode()).hexdigest()
                known = _remembered(memo)
                self._hash = known or hashlib.file_digest(file, "sha256").hexdigest()
            if not known:
                _remember(memo, self._hash)
        return self._hash

    def _read(self, data: _Cursor) -> None:
        version = data.scalar("I")
        if version not in (2, 3):
            raise ModelError(
                f"--model {self.path}: GGUF version {version} is not supported (only little-endian 2 and 3)"
            )
        tensors, keys = data.scalar("Q"), data.scalar("Q")
        for _ in range(keys):
            key = data.string()
            self.metadata[key] = self._value(data, data.scalar("I"))
        entries = [self._tensor(data) for _ in range(tensors)]
        expect(
            self.metadata,
            {"general.alignment": Annotated[int, msgspec.Meta(ge=0)] | None},
            f"--model {self.path}: GGUF metadata",
        )
        alignment = self.metadata.get("general.alignment") or 32
        start = math.ceil(data.at / alignment) * alignment
        for entry in entries:
            self.tensors[entry.name] = placed = entry._replace(offset=start + entry.offset)
            if placed.offset + placed.nbytes > len(data):
                raise ModelError(
                    f"--model {self.path}: the GGUF file is cut short: tensor {entry.name} ends at byte "
                    f"{placed.offset + placed.nbytes}, the file at {len(data)}; download it again"
                )

    def _value(self, data: _Cursor, kind: int) -> Any:
        if kind == _STRING:
            return data.string()
        if kind != _ARRAY:
            return data.scalar(self._code(kind))
        item, count = data.scalar("I"), data.scalar("Q")
        if item == _STRING:
            return data.strings(count)
        if item == _ARRAY:
            return [self._value(data, _ARRAY) for _ in range(count)]
        return data.scalars(self._code(item), count)

    def _code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise ModelError(f"--model {self.path}: damaged GGUF file: unknown metadata type {kind}")
        return _SCALARS[kind]

    def _tensor(self, data: _Cursor) -> TensorInfo:
        name = data.string()
        shape = tuple(reversed(data.scalars("Q", data.scalar("I"))))
        number, offset = data.scalar("I"), data.scalar("Q")
        try:
            kind = gguf.GGMLQuantizationType(number)
        except ValueError as exc:
            raise ModelError(
                f"--model {self.path}: tensor {name} has quantisation type {number}, unknown to the gguf package"
            ) from exc
        block, size = gguf.GGML_QUANT_SIZES[kind]
        return TensorInfo(name, shape, kind, offset, math.prod(shape) // block * size)


def _remembered(memo: Path) -> str:
    """Empty where there is none, or a damaged one."""
    try:
        text = memo.read_text("ascii", "replace")
    except OSError:
        return ""
    return text if re.fullmatch("[0-9a-f]{64}", text) else ""


def _remember(memo: Path, text: str) -> None:
    try:
        memo.parent.mkdir(parents=True, exist_ok=True)
        fresh = memo.with_suffix(f".{os.getpid()}")
        fresh.write_text(text, "ascii")
        fresh.replace(memo)
    except OSError as error:  # computed again next time
        get_logger(__name__).warning("a file's hash is not kept", folder=str(memo.parent), reason=str(error))


class _Cursor:
    """Reads little-endian values one after the other. Raises EOFError or struct.error at the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.at = 4  # behind the magic number

    def __len__(self) -> int:
        return len(self._data)

    def scalar(self, code: str) -> Any:
        return self.scalars(code, 1)[0]

    def scalars(self, code: str, count: int) -> list[Any]:
        size = struct.calcsize(code) * count
        if self.at + size > len(self._data):
            raise EOFError
        values = struct.unpack_from(f"<{count}{code}", self._data, self.at)
        self.at += size
        return list(values)

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        data, at, end = self._data, self.at, len(self._data)
        length = struct.Struct("<Q").unpack_from
        out = []
        for _ in range(count):
            (size,) = length(data, at)
            at += 8 + size
            if at > end:
                raise EOFError
            out.append(data[at - size : at].decode("utf-8", "replace"))
        self.at = at
        return out
