"""Kernel backends: operation tables and the layouts of weights and cache pages that go with them."""

from __future__ import annotations

from framework import KernelBackend, Provider, hookimpl


def _torch() -> KernelBackend:
    from .torch_backend import TorchBackend

    return TorchBackend()


@hookimpl
def providers() -> list[Provider]:
    return [Provider("kernel", "torch", _torch, summary="plain torch on any device; oneDNN weights on CPU")]
