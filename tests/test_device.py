"""The device layer, as far as a CPU shows it."""

from __future__ import annotations

import torch

from framework import machine
from framework.device import CudaDevice, Device, make_device


def test_the_layer_is_that_of_the_device_s_kind() -> None:
    assert type(make_device(torch.device("cpu"))) is Device
    cuda = make_device(torch.device("cuda:1"))  # none is asked for anything yet
    assert type(cuda) is CudaDevice and cuda.torch.index == 1


def test_on_a_cpu_all_is_done_when_a_call_returns() -> None:
    device = make_device(torch.device("cpu"))
    x, y = torch.arange(3), torch.ones(2)
    fetched = device.fetch([x, y])
    assert fetched.ready() and not device.asynchronous
    device.synchronize()
    device.release_memory()
    assert [found.tolist() for found in fetched.wait()] == [[0, 1, 2], [1, 1]]
    assert device.name == machine.cpu_name() and 0 < device.free_memory() <= machine.free_memory() * 2
