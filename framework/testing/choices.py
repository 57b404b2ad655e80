"""What every kernel backend must make of rows of logits, as tests; a part of `KernelConformance`."""

from __future__ import annotations

import numpy as np
import torch

from ..kernels import KernelBackend


class Choices:
    """The operations that choose among the columns of a row."""

    def _ready(
        self, dtype: str, *ops: str, head_dim: int = 0, window: int | None = None, block_size: int | None = None
    ) -> tuple[KernelBackend, torch.dtype, torch.device]:
        raise NotImplementedError

    @torch.inference_mode()
    def test_argmax(self) -> None:
        """The first of equals; a NaN is larger than all, and its value is told; rows may be all masked, or none."""
        backend, _, device = self._ready("float32", "argmax")
        for rows, vocab in ((0, 10), (1, 1), (3, 7), (5, 1000), (33, 4099)):
            x = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)).round(decimals=1)
            if rows > 4:
                x[0], x[1, vocab // 2], x[2, [3, vocab - 1]], x[3, vocab - 1] = -torch.inf, torch.nan, 99.0, 99.0
            tokens, values = backend.argmax(x.to(device))
            expected = torch.from_numpy(x.numpy().argmax(-1))
            assert tokens.dtype == torch.int64 and tokens.tolist() == expected.tolist()
            same = torch.isclose(values.cpu(), x.gather(1, expected[:, None])[:, 0], 0, 0, equal_nan=True)
            assert values.dtype == torch.float32 and same.all(), "the logits of the likeliest tokens"

    @torch.inference_mode()
    def test_largest(self) -> None:
        """In order of column, all equals of the last; rows with a bound, a number, both and neither, rising and
        falling ones, where numbers repeat and where all are one; x is left as it is."""
        backend, _, device = self._ready("float32", "largest")
        for rows, vocab in ((0, 10), (1, 1), (6, 7), (40, 1000), (17, 20011)):
            generator = torch.Generator().manual_seed(vocab)
            x = torch.randn(rows, vocab, generator=generator) * 3
            x[1::5] = x[1::5].round()
            x[2::10], x[7::10] = x[2::10].sort(-1).values, x[7::10].sort(-1, descending=True).values
            x[3::10], x[8::10, vocab // 3 :] = 2.0, -torch.inf
            sizes = torch.tensor([0, 1, 2, 5, vocab // 2, vocab, vocab + 1, 2**40])
            counts = sizes[torch.randint(len(sizes), (rows,), generator=generator)]
            bounds = torch.tensor([-torch.inf, -2.0, 0.0, 2.0, 5.0, torch.inf])
            least = bounds[torch.randint(len(bounds), (rows,), generator=generator)]
            found = [one.cpu() for one in backend.largest(x.to(device), counts.to(device), least.to(device))]
            columns, values, lengths = found
            assert [one.dtype for one in found] == [torch.int64, torch.float32, torch.int64]
            assert lengths.shape == (rows,)
            at = np.split(columns.numpy(), lengths.cumsum(0).numpy())
            for row, count, bound, some in zip(x.numpy(), counts.tolist(), least.tolist(), at, strict=False):
                if 0 < count < vocab:
                    bound = max(bound, np.sort(row)[-count])
                assert some.tolist() == np.flatnonzero(row >= bound).tolist(), f"{count} largest, from {bound}"
            rows_of = torch.arange(rows).repeat_interleave(lengths)
            assert torch.equal(values, x[rows_of, columns]), "the values at these columns"
