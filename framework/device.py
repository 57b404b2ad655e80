"""What an executor asks of the device besides computing: to wait, to tell its memory, to bring results to the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import machine


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

    asynchronous = False
    """Whether it may still be at work when the call returns."""

    def __init__(self, device: torch.device) -> None:
        self.torch = device

    @property
    def name(self) -> str:
        return machine.cpu_name()

    def free_memory(self) -> int:
        """Bytes that a KV pool could have."""
        return machine.free_memory()

    def synchronize(self) -> None:
        """Return once all that was asked of the device is done."""

    def release_memory(self) -> None:
        """Give memory that nothing uses back to the system."""

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetched:
        """Begin to copy tensors to the host: behind what the device was asked to do before, and not behind what it is
        asked to do later."""
        return Fetched(tensors)


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

    asynchronous = True

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch)

    def free_memory(self) -> int:
        return torch.cuda.mem_get_info(self.torch)[0]

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch)

    def release_memory(self) -> None:
        torch.cuda.empty_cache()

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetched:
        return _CudaFetched(tensors, self.torch)


def make_device(device: torch.device) -> Device:
    return CudaDevice(device) if device.type == "cuda" else Device(device)
