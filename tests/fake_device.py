"""A GPU in the host's memory, for tests: what is sent is a copy, memory is as large as a test says, and graphs replay
what was captured and nothing else."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from framework import device as devices
from framework.device import Device, Fetched, Graph, pack, unpack

CPU = torch.device("cpu")
GARBAGE = 0xA5
WAITS = (torch.ops.aten.item, torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero)
"""Operations for which the host waits."""


class Recorder(TorchDispatchMode):
    """Remembers every operation, with the tensors that it was given and those it gave."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in WAITS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


class FakeGraph:
    """Replays operations on the tensors of the capture, whatever Python would do now. Results get the addresses that
    they had; in between, they are spoilt."""

    def __init__(self, run: Callable[[], object]) -> None:
        run()
        with Recorder() as recorder:
            run()
        self.calls = recorder.calls
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        owned = [x for call in self.calls for x in self._results(call)]
        for x in owned:
            if x.is_floating_point():
                x.fill_(float("nan"))
        for call in self.calls:
            func, args, kwargs, out = call
            results = self._results(call)
            found = func(*args, **kwargs)
            if results:
                for ours, theirs in zip(_tensors(out), _tensors(found), strict=True):
                    ours.copy_(theirs)

    @staticmethod
    def _results(call: tuple[Any, tuple[Any, ...], dict[str, Any], Any]) -> list[torch.Tensor]:
        """Tensors of memory that the call took; none if it changed its arguments, or looked at them in another way."""
        _, args, kwargs, out = call
        known = {x.untyped_storage().data_ptr() for x in _tensors([*args, *kwargs.values()])}
        return [x for x in _tensors(out) if x.numel() and x.untyped_storage().data_ptr() not in known]


class FakeDevice(Device):
    """`total`: bytes of memory; `used`: those taken; a step takes `step` bytes, a graph `graph` (the first, the
    largest, `first` more)."""

    dedicated = graphs = asynchronous = True

    def __init__(self, total: int = 1 << 34, used: int = 0, step: int = 0, graph: int = 0, first: int = 0) -> None:
        super().__init__(CPU)
        self.total, self.used, self.step, self.graph, self.first = total, used, step, graph, first
        self.copies = 0
        self._captured: list[weakref.ref[FakeGraph]] = []
        self.released = 0
        self.refuse: Callable[[int], str] = lambda count: ""
        """Why the capture with this number fails; empty: it does not."""

    def free_memory(self) -> int:
        return self.total - self.used - sum(self.graph + self.first * (not i) for i, _ in enumerate(self.captured))

    @property
    def captured(self) -> list[FakeGraph]:
        """Graphs that exist, in the order of their capture."""
        return [graph for graph in (one() for one in self._captured) if graph is not None]

    def total_memory(self) -> int:
        return self.total

    def peak(self, run: Callable[[], object]) -> int:
        run()
        return self.step

    def release_memory(self) -> None:
        self.released += 1

    def send(self, arrays: Sequence[np.ndarray[Any, Any]]) -> list[torch.Tensor]:
        self.copies += 1
        here = pack(arrays, lambda size: torch.full((size,), GARBAGE, dtype=torch.uint8))
        return unpack(here.clone(), arrays)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetched:
        return Fetched([x.clone() for x in tensors])

    def capture(self, run: Callable[[], object], beside: Graph | None = None) -> Graph:
        why = self.refuse(len(self.captured))
        if why:
            raise RuntimeError(why)
        assert beside is None or beside in self.captured
        graph = FakeGraph(run)
        self._captured.append(weakref.ref(graph))
        return graph


@contextmanager
def installed(device: Device) -> Iterator[None]:
    """In the place of the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(devices._devices, CPU, device)
        yield
