"""The device layer, as far as a CPU shows it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fake_device import FakeDevice
from hypothesis import given
from hypothesis import strategies as st

from framework import PluginError, machine, send
from framework.device import CudaDevice, Device, lost, make_device, out_of_memory


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


def test_what_is_sent_on_a_cpu_is_the_arrays_themselves() -> None:
    array = np.arange(6).reshape(2, 3)
    [tensor] = send([array], torch.device("cpu"))
    array[1, 2] = 9
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 9]]


KINDS = (np.int64, np.int32, np.float32, np.bool_, np.uint8)


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 3), st.integers(0, 40)), min_size=1, max_size=6))
def test_what_is_sent_together_arrives_as_it_was(shapes: list[tuple[type, int, int]]) -> None:
    """Whatever types, shapes and strides, in one copy; each begins where a vector of 16 bytes may. Changed afterwards,
    the arrays change nothing."""
    rng, device = np.random.default_rng(1), FakeDevice()
    arrays = [rng.integers(0, 2, (rows, 2 * columns)).astype(kind)[:, ::2] for kind, rows, columns in shapes]
    expected = [array.copy() for array in arrays]
    sent = device.send(arrays)
    assert device.copies == 1
    for array in arrays:
        array[:] = ~array if array.dtype == np.bool_ else array + 1
    for array, tensor in zip(expected, sent, strict=True):
        assert tensor.dtype == torch.from_numpy(array).dtype and tensor.is_contiguous()
        assert (tensor.data_ptr() - sent[0].data_ptr()) % 16 == 0 or not array.size
        assert np.array_equal(tensor.numpy(), array)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), MemoryError(), PluginError("sample: CUDA out of memory.")]
)
def test_out_of_memory(error: Exception) -> None:
    if isinstance(error, PluginError):
        assert not out_of_memory(error)
        error.__cause__ = torch.OutOfMemoryError()
    assert out_of_memory(error)


def test_memory_of_the_host_runs_out() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    assert out_of_memory(caught.value) and not out_of_memory(RuntimeError("no such kernel"))


def test_what_a_driver_s_error_means() -> None:
    """Memory that ran out is given back by somebody; what else a driver says ends all that it did."""
    memory = torch.AcceleratorError("CUDA error: out of memory")
    access = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    assert (out_of_memory(memory), lost(memory)) == (True, False)
    assert (out_of_memory(access), lost(access)) == (False, True)
    assert not lost(torch.OutOfMemoryError("CUDA out of memory")) and not lost(RuntimeError("CUDA error"))
