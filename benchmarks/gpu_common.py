"""What the sections of gpu_check.py share: the report, timing, and the device's limits. Imports torch and no more."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


class Skip(Exception):
    """A section that cannot run here, and why."""


class Wrong(Exception):
    """Results that are not what they have to be, or exceptions; each was shown where it was found."""


class Report:
    """What was found, in one table and one file, which is written again after each section."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.about: dict[str, Any] = {}
        self.sections: dict[str, dict[str, Any]] = {}
        self._current: dict[str, Any] = {}

    def begin(self, name: str) -> None:
        self._current = self.sections[name] = {"status": "", "rows": [], "goals": [], "wrong": [], "raised": []}
        print(f"\n{name}", flush=True)

    def end(self, status: str, seconds: float, error: str = "") -> None:
        self._current |= {"status": status, "seconds": round(seconds, 2), "error": error}
        self.write()

    def row(self, what: str, shown: str, **figures: Any) -> None:
        self._current["rows"].append({"what": what, **figures})
        print(f"  {what:44} {shown}", flush=True)

    def goal(self, text: str, met: bool) -> None:
        self._current["goals"].append({"goal": text, "met": bool(met)})

    def check(self, what: str, right: bool, shown: str, **figures: Any) -> None:
        """A row about a result; `raise_wrong` fails the section if it is not right."""
        self.row(what, shown if right else f"{shown}  WRONG", right=bool(right), **figures)
        if not right:
            self._current["wrong"].append(f"{what}: {shown}")

    @contextmanager
    def part(self, what: str) -> Iterator[None]:
        """One of a section's parts: what it raises is shown, and the next part goes on."""
        try:
            yield
        except (Skip, Wrong):
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is: `raise_wrong` fails the section
            text = "".join(traceback.format_exception(error))
            self._current["raised"].append({"what": what, "error": text})
            print(f"  {what:44} FAILED\n{text[-1500:]}", flush=True)

    def raise_wrong(self) -> None:
        raised = [f"{one['what']}: {one['error'].strip().splitlines()[-1]}" for one in self._current["raised"]]
        if wrong := [*raised, *self._current["wrong"]]:
            raise Wrong("\n".join(wrong))

    @property
    def goals(self) -> list[tuple[str, bool]]:
        return [(goal["goal"], goal["met"]) for one in self.sections.values() for goal in one["goals"]]

    def write(self) -> None:
        if self.path is not None:
            self.path.write_text(json.dumps({"about": self.about, "sections": self.sections}, indent=1, default=str))


class Run:
    """One run on one device: sections ask it how long they may go on, and how fast the device is."""

    def __init__(self, device: torch.device, interpret: bool, report: Report, limit: float) -> None:
        self.device, self.interpret, self.report = device, interpret, report
        self.end = time.monotonic() + limit
        self.deadline = self.end
        self.missing: list[str] = []
        self.big: Any = None  # the large model's engine, between sections
        self._limits: dict[str, float] = {}

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def left(self) -> float:
        """Seconds that the section still has."""
        return self.deadline - time.monotonic()

    def pick(self, gpu: Any, tiny: Any) -> Any:
        return tiny if self.interpret else gpu

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def free_memory(self) -> int:
        if not self.cuda:
            return 1 << 28
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]

    # Limits

    def limit(self, name: str, measure: Callable[[], float]) -> float:
        if name not in self._limits:
            self._limits[name] = measure()
            self.report.about.setdefault("limits", {})[name] = self._limits[name]
        return self._limits[name]

    @property
    def bandwidth(self) -> float:
        """Bytes per second, read and written, of torch's copy of a tensor that no cache holds."""

        def measure() -> float:
            size = self.pick(2 << 30, 1 << 20)
            source = torch.empty(size, dtype=torch.uint8, device=self.device).fill_(3)
            target = torch.empty_like(source)
            return 2 * size / self.seconds([lambda: target.copy_(source)], 1.0)

        return self.limit("bytes/s of a copy", measure)

    @property
    def flops(self) -> float:
        """Operations per second of torch's product of large random matrices in bfloat16."""

        def measure() -> float:
            n = self.pick(8192, 128)
            a, b = (torch.randn(n, n, device=self.device).to(torch.bfloat16) for _ in range(2))
            return 2 * n**3 / self.seconds([lambda: a @ b], 1.0)

        return self.limit("operations/s of a product", measure)

    # Time

    def seconds(self, works: Sequence[Callable[[], object]], budget: float, graph: bool = True) -> float:
        """Of one of `works`, which are run in turn: the median of rounds of a millisecond or more, until `budget`
        seconds are spent. graph: they are captured and replayed, so that launching them is not timed."""
        for work in works:
            work()
        self.synchronize()
        if not self.cuda:
            begin = time.perf_counter()
            for work in works:
                work()
            return (time.perf_counter() - begin) / len(works)
        budget = min(budget, max(0.05, self.left()))
        end, once = time.monotonic() + budget, self._once(works, graph)
        once()  # the first replay uploads the graph
        rounds = max(1, math.ceil(1e-3 / self._timed(once, 1)))
        found = [self._timed(once, rounds)]
        while time.monotonic() < end and len(found) < 200:
            found.append(self._timed(once, rounds))
        return statistics.median(found[1:] or found) / len(works)

    def _once(self, works: Sequence[Callable[[], object]], graph: bool) -> Callable[[], object]:
        def each() -> None:
            for work in works:
                work()

        if not graph:
            return each
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            each()
        return captured.replay

    def _timed(self, once: Callable[[], object], rounds: int) -> float:
        """Seconds of one of so many, by the device's clock."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(rounds):
            once()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / rounds


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error, relative to each number and the root mean square of its row, as rows of longer contexts hold
    smaller numbers; infinite where one is NaN."""
    found, expected = found.double(), expected.to(found.device).double()
    if not expected.numel():
        return 0.0
    far = (found - expected).abs() / (expected.abs() + expected.square().mean(-1, keepdim=True).sqrt())
    return float(far.nan_to_num(nan=math.inf).max())


def about(run: Run) -> dict[str, Any]:
    """What the run is of."""

    def version(name: str) -> str:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return "missing"

    known: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "triton", "numpy", "transformers", "flash-attn")},
        "device": "none: Triton's interpreter on the CPU; timings mean nothing" if run.interpret else "",
        "missing": run.missing,
    }
    if run.cuda:
        found = torch.cuda.get_device_properties(run.device)
        known["device"] = found.name
        known |= {"cuda": torch.version.cuda, "capability": f"{found.major}.{found.minor}"}
        known |= {"processors": found.multi_processor_count, "memory": found.total_memory}
    return known
