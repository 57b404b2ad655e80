"""Kernel backends: operation tables and the layouts of weights and cache pages that go with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from framework import KernelBackend, Provider, hookimpl

from .cpu import CpuOptions
from .flash import FlashOptions

if TYPE_CHECKING:
    from framework.settings import Settings


def _cpu(options: CpuOptions, settings: Settings) -> KernelBackend:
    from .cpu.backend import CpuBackend

    return CpuBackend(options, settings.quantization)


def _flash(options: FlashOptions, settings: Settings) -> KernelBackend:
    from .flash.backend import FlashBackend

    return FlashBackend(options, settings.block_size)


def _triton(settings: Settings) -> KernelBackend:
    from .triton.backend import TritonBackend

    return TritonBackend(settings)


def _torch() -> KernelBackend:
    from .torch_backend import TorchBackend

    return TorchBackend()


@hookimpl
def providers() -> list[Provider]:
    """In the order in which `--kernel auto` asks them."""
    return [
        Provider("kernel", "cpu", _cpu, CpuOptions, summary="C++ compiled for this CPU; float32 and bfloat16"),
        Provider("kernel", "triton", _triton, summary="Triton kernels for NVIDIA GPUs from capability 8.0 on"),
        Provider(
            "kernel", "flash", _flash, FlashOptions, summary="attention by flash-attn, flashinfer or torch; NVIDIA GPUs"
        ),
        Provider("kernel", "torch", _torch, summary="plain torch on any device; oneDNN weights on CPU"),
    ]
