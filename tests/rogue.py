"""A plugin that does to its engine what a request says in `extra`: `sleep` or `spin` for so many seconds, send itself a
`signal`, start a `child` process, `raise` an error, make the logits of its third token `nan`. Its route /stuck takes a
thread of the server's for good."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fastapi import APIRouter

from framework import Provider, Request, hookimpl


class Rogue:
    def __init__(self) -> None:
        self.spoilt: set[str] = set()

    @hookimpl
    def accept(self, request: Request) -> None:
        extra = request.extra
        if "nan" in extra:
            self.spoilt.add(request.id)
        time.sleep(extra.get("sleep", 0))
        until = time.monotonic() + extra.get("spin", 0)
        while time.monotonic() < until:
            pass
        if "child" in extra:
            subprocess.Popen(["sleep", "600"])
        if "raise" in extra:
            raise RuntimeError(extra["raise"])
        if "signal" in extra:
            os.kill(os.getpid(), extra["signal"])

    @hookimpl
    def process_logits(self, logits: Any, batch: Any) -> None:
        for row, owner in enumerate(batch.owner):
            if batch.ids[owner] in self.spoilt and batch.output_len[owner] == 2:
                logits[row, 3] = float("nan")

    @hookimpl
    def routes(self) -> Iterable[APIRouter]:
        router = APIRouter()

        @router.get("/stuck")
        def stuck() -> None:
            time.sleep(600)

        return [router]


@hookimpl
def providers() -> Iterable[Provider]:
    return [Provider("plugin", "rogue", Rogue, summary="does what plugins should not")]


def install(folder: Path) -> Path:
    """Make it a plugin of every process that has the folder in its PYTHONPATH; returns the folder."""
    about = folder / "rogue-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: rogue\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[framework.plugins]\nrogue = rogue\n")
    shutil.copy(__file__, folder / "rogue.py")
    return folder
