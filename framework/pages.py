"""Memory of huge pages.

Reading weights or a KV cache touches page after page once, and with pages of 4 KiB looking up where they lie takes two
thirds as long as reading them. Linux gives pages of 2 MiB to those who ask (transparent huge pages, unless
/sys/kernel/mm/transparent_hugepage/enabled says `never`).
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from math import prod

import numpy as np
import torch

HUGE = 2 << 20
LINE = 64


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros in host memory, which the system gives as it is touched; begins where a huge page does."""
    size = prod(shape) * dtype.itemsize
    if size < HUGE // 2:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    first = -np.frombuffer(memory, np.uint8).ctypes.data % HUGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them: ordinary pages do, too
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[first : first + size].view(dtype).view(shape)


class Arena:
    """Hands out pieces of larger stretches, since a matrix alone may be smaller than a huge page. A stretch is given
    back when no piece of it is in use any more."""

    STRETCH = 16 * HUGE

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Undefined contents; begins where a cache line does."""
        size = prod(shape) * dtype.itemsize
        if size > self.STRETCH // 4:
            return zeros(shape, dtype)
        if size > self._rest.numel():
            self._rest = zeros((self.STRETCH,), torch.uint8)
        piece, self._rest = self._rest[:size], self._rest[-(-size // LINE) * LINE :]
        return piece.view(dtype).view(shape)
