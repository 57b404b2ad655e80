"""What an executor asks of the device besides computing: to wait, to tell its memory, to take inputs and bring results,
to repeat what it did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from . import machine
from .errors import ConfigError

Array = np.ndarray[Any, Any]
ALIGNMENT = 16
"""Bytes at whose multiples the arrays that are sent together begin."""


class Graph(Protocol):
    """What a device was asked to do while it was captured."""

    def replay(self) -> None:
        """Do it again, with what its inputs, at the addresses that they had, now hold."""


class Fetched:
    """Tensors on their way to the host."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors

    def ready(self) -> bool:
        return True

    def wait(self) -> Sequence[torch.Tensor]:
        """The tensors, on the host."""
        return self._tensors


class Device:
    """A CPU: whatever it is asked to do is done when the call returns. `torch` is the device in torch's terms."""

    dedicated = False
    """Whether its memory is its own: what it computes with has to be sent, and what a step takes can be measured."""
    graphs = False
    """Whether it has `capture`."""
    asynchronous = False
    """Whether it may still be at work when a call returns."""

    def __init__(self, device: torch.device) -> None:
        self.torch = device

    def begin(self) -> None:
        """Make it the one that this thread means. Called before anything is asked of it."""

    @property
    def name(self) -> str:
        return machine.cpu_name()

    def free_memory(self) -> int:
        """Bytes that a KV pool could have."""
        return machine.free_memory()

    def total_memory(self) -> int:
        """Bytes of a dedicated device, whoever uses them."""
        raise NotImplementedError

    def peak(self, run: Callable[[], object]) -> int:
        """The most bytes of a dedicated device that `run` takes at once, beyond those taken before."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Return once all that was asked of the device is done."""

    def release_memory(self) -> None:
        """Give memory that nothing uses back to the system."""

    def send(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        """Arrays as tensors of the device, in one copy behind what it was asked to do before. They may be changed once
        this returns; a CPU's tensors are the arrays' own memory, and change with them."""
        return [torch.from_numpy(array) for array in arrays]

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetched:
        """Begin to copy tensors to the host: behind what the device was asked to do before, and not behind what it is
        asked to do later."""
        return Fetched(tensors)

    def capture(self, run: Callable[[], object], beside: Graph | None = None) -> Graph:
        """Run it twice: once for what is set up on first use, then captured. `beside`: a graph whose scratch memory
        this one uses too, so that they never run at once. Raises what torch raises where something cannot be captured.
        """
        raise NotImplementedError


class _CudaFetched(Fetched):
    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        super().__init__(
            [torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True) for x in tensors]
        )
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(device))

    def ready(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> Sequence[torch.Tensor]:
        self._event.synchronize()
        return super().wait()


class CudaDevice(Device):
    """A CUDA device, which does one thing after the other while the host goes on."""

    dedicated = graphs = asynchronous = True
    _side: torch.cuda.Stream | None = None
    """On which all is captured: libraries keep scratch memory for each stream that they have seen."""

    def begin(self) -> None:
        torch.cuda.set_device(self.torch if self.torch.index is not None else torch.cuda.current_device())

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch)

    def free_memory(self) -> int:
        return torch.cuda.mem_get_info(self.torch)[0]

    def total_memory(self) -> int:
        return torch.cuda.mem_get_info(self.torch)[1]

    def peak(self, run: Callable[[], object]) -> int:
        self.synchronize()
        torch.cuda.reset_peak_memory_stats(self.torch)
        before = torch.cuda.memory_allocated(self.torch)
        run()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.torch) - before

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch)

    def release_memory(self) -> None:
        torch.cuda.empty_cache()

    def send(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        # Torch gives page-locked memory out again only when the copies from it are done.
        here = pack(arrays, lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True))
        return unpack(here.to(self.torch, non_blocking=True), arrays)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetched:
        return _CudaFetched(tensors, self.torch)

    def capture(self, run: Callable[[], object], beside: Graph | None = None) -> Graph:
        own, graph = torch.cuda.current_stream(self.torch), torch.cuda.CUDAGraph()
        pool = beside.pool() if isinstance(beside, torch.cuda.CUDAGraph) else None
        side = self._side = self._side or torch.cuda.Stream(self.torch)  # type: ignore[no-untyped-call]
        side.wait_stream(own)
        try:
            with torch.cuda.stream(side):  # not on the stream that eager steps use, as torch demands
                run()
            own.wait_stream(side)
            # What other threads ask of the device meanwhile is none of the graph's business.
            with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                run()
        finally:
            torch.cuda.set_stream(own)  # a capture that fails leaves its own behind
        return graph


def pack(arrays: Sequence[Array], make: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """Copy arrays one behind the other, each at a multiple of `ALIGNMENT` bytes. make: uint8 of so many bytes."""
    buffer = make(sum(map(_padded, arrays)))
    memory, start = buffer.numpy(), 0
    for array in arrays:
        memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
        start += _padded(array)
    return buffer


def unpack(buffer: torch.Tensor, arrays: Sequence[Array]) -> list[torch.Tensor]:
    """Views of what `pack` made of them, wherever it is now."""
    views, start = [], 0
    for array in arrays:
        views.append(buffer[start : start + array.nbytes].view(_dtype(array.dtype)).view(array.shape))
        start += _padded(array)
    return views


def _padded(array: Array) -> int:
    return -(-array.nbytes // ALIGNMENT) * ALIGNMENT


_dtypes: dict[np.dtype[Any], torch.dtype] = {}


def _dtype(of: np.dtype[Any]) -> torch.dtype:
    found = _dtypes.get(of)
    if found is None:
        found = _dtypes[of] = torch.from_numpy(np.empty(0, of)).dtype
    return found


_devices: dict[torch.device, Device] = {}


def make_device(device: torch.device) -> Device:
    """The one that stands for `device` in this process."""
    found = _devices.get(device)
    if found is None:
        found = _devices[device] = CudaDevice(device) if device.type == "cuda" else Device(device)
    return found


def send(arrays: Sequence[Array], device: torch.device) -> list[torch.Tensor]:
    """What a kernel backend moves to its device in `prepare` and `advance`: see `Device.send`."""
    return make_device(device).send(arrays)


def resolve_device(name: str) -> torch.device:
    """The device of `--device`. Raises `ConfigError` for one that cannot be used here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name}: expected auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            reason = "this build of torch has no CUDA" if torch.version.cuda is None else "no CUDA device is usable"
            raise ConfigError(f"--device {name}: {reason}; use --device cpu or auto")
        found = torch.cuda.device_count()
        if (device.index or 0) >= found:
            raise ConfigError(f"--device {name}: this machine has cuda:0 to cuda:{found - 1}")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The type of `--dtype`. auto: bfloat16 where the hardware computes in it, else float32."""
    if name == "auto":
        name = "bfloat16" if _has_bfloat16(device) else "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _has_bfloat16(device: torch.device) -> bool:
    """Whether the hardware computes in bfloat16, by torch's own account of it: emulation is slower than float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # Which of these exist differs between versions of torch; what it cannot tell counts as missing.
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    features = ("avx512_bf16", "amx_bf16", "bf16")
    return any(bool(capabilities.get(f) or getattr(torch.cpu, f"_is_{f}_supported", bool)()) for f in features)


def out_of_memory(error: BaseException) -> bool:
    """Whether it says that memory ran out, a device's or the host's, be it through a plugin's error."""
    while True:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError) and ("DefaultCPUAllocator" in str(error) or _driver_out_of_memory(error)):
            return True
        if error.__cause__ is None:
            return False
        error = error.__cause__


def lost(error: BaseException) -> bool:
    """Whether it says that the device does nothing more in this process, such as after an access to memory that is
    not there."""
    return isinstance(error, torch.AcceleratorError) and not _driver_out_of_memory(error)


def _driver_out_of_memory(error: BaseException) -> bool:
    """Page-locked memory, graphs and libraries' handles are asked of the driver itself."""
    return isinstance(error, torch.AcceleratorError) and "out of memory" in str(error)
