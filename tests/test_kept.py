"""Converted weights that are kept between starts: found again, and only as they were made."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import tiny_checkpoint, tiny_gguf
from framework.plugins.kernels.cpu import CpuOptions
from framework.plugins.kernels.cpu.backend import CpuBackend
from framework.plugins.kernels.torch_backend import TorchBackend
from framework.plugins.models import gguf
from framework.plugins.models.gguf import GGUFCheckpoint
from framework.plugins.models.gguf_file import GGUFFile
from test_cpu_blocks import logits, model

from framework import LLM, KernelBackend, SamplingParams, kept

SHAPES = [((3, 5, 16, 4), torch.int8), ((7,), torch.float16), ((2, 0), torch.uint8)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kept, "SPARE", 0)
    return tmp_path / "cache" / "framework" / "weights"


def keep(make: Callable[[list[torch.Tensor]], None], *parts: str, source: Path = Path(__file__)) -> list[torch.Tensor]:
    return kept.kept(parts or ("a",), (source,), SHAPES, make)


class Maker:
    """Fills tensors with the number of times that it was asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, tensors: list[torch.Tensor]) -> None:
        self.calls += 1
        for tensor in tensors:
            assert not tensor.any()
            tensor.fill_(self.calls)


def entries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name != "lock")


def same(tensors: list[torch.Tensor], value: int) -> bool:
    return all(
        (tuple(tensor.shape), tensor.dtype) == shape and bool((tensor == value).all()) and not tensor.data_ptr() % 64
        for tensor, shape in zip(tensors, SHAPES, strict=True)
    )


def test_made_once(folder: Path, tmp_path: Path) -> None:
    make, source = Maker(), tmp_path / "source"
    source.write_text("code")
    for _ in range(3):
        assert same(keep(make), 1)
    assert same(keep(make, "a", "b"), 2), "what they depend on is another"
    assert same(keep(make, source=source), 3), "other code makes them"
    shapes = [(shape[::-1], dtype) for shape, dtype in SHAPES]
    kept.kept(["a"], (Path(__file__),), shapes, make)
    assert make.calls == len(entries(folder)) == 4, "of as many bytes, and of other shapes"
    found = keep(make)
    found[0].fill_(99)
    assert same(keep(make), 1), "writing to what is mapped leaves the file alone"


def test_by_many_at_once(folder: Path) -> None:
    make = Maker()

    def one(_: int) -> list[torch.Tensor]:
        return keep(lambda tensors: [tensor.fill_(1) for tensor in tensors] and None)

    with ThreadPoolExecutor(4) as pool:  # as four processes would: the lock is on an open file
        assert all(same(found, 1) for found in pool.map(one, range(8)))
    assert len(entries(folder)) == 1
    keep(make)
    assert not make.calls


@pytest.mark.parametrize("damage", ["cut short", "longer", "empty", "end", "a folder"])
def test_damaged_entries(folder: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    make = Maker()
    keep(make)
    (entry,) = entries(folder)
    whole = entry.read_bytes()
    changed = {"cut short": whole[:-70], "longer": whole + b"x", "empty": b"", "end": whole[:-1] + b"\0"}
    entry.unlink()
    if damage == "a folder":
        entry.mkdir()
    else:
        entry.write_bytes(changed[damage])
    assert same(keep(make), 2)
    assert entries(folder) == [entry], "nothing else is left"
    assert same(keep(make), 3 if damage == "a folder" else 2)
    assert ("converted weights are not kept" in caplog.text) == (damage == "a folder")


@pytest.mark.parametrize("trouble", ["a file in the way", "full", "fills up"])
def test_what_cannot_be_kept_is_used_all_the_same(
    folder: Path, trouble: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    if trouble == "a file in the way":
        folder.parent.mkdir(parents=True)
        folder.touch()
    elif trouble == "full":
        monkeypatch.setattr(kept, "SPARE", 1 << 30)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 30))
    else:

        def fails(_: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", fails)
    make = Maker()
    assert same(keep(make), 1) and same(keep(make), 2)
    assert caplog.text.count("converted weights are not kept") == 1, "and not for each of them"
    assert trouble == "a file in the way" or entries(folder) == []


def test_a_files_hash_is_remembered_until_it_changes(folder: Path, tmp_path: Path, tiny_llama_gguf: Path) -> None:
    path = Path(shutil.copy(tiny_llama_gguf, tmp_path / "m.gguf"))
    expected = hashlib.sha256(path.read_bytes()).hexdigest()
    assert GGUFFile(path).content_hash() == expected
    (memo,) = (folder.parent / "hashes").iterdir()
    memo.write_text("0" * 64)
    assert GGUFFile(path).content_hash() == "0" * 64, "it was not computed again"
    memo.write_text("damaged")
    assert GGUFFile(path).content_hash() == expected == memo.read_text()
    memo.write_text("0" * 64)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert GGUFFile(path).content_hash() == hashlib.sha256(path.read_bytes()).hexdigest()
    (folder.parent / "hashes").rename(tmp_path / "gone")
    (folder.parent / "hashes").touch()
    assert GGUFFile(path).content_hash() == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_model_that_is_started_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks, only what has to be rounded is kept; both starts compute the same."""
    monkeypatch.setattr(kept, "LEAST", 1)
    source = tiny_checkpoint(tmp_path, num_hidden_layers=2, hidden_size=256, head_dim=32)
    path = tiny_gguf(tmp_path, source, "Q8_0", kinds={"attn_v": "Q6_K", "token_embd": "Q6_K"})
    cpu = CpuBackend()
    first = logits(model(path, cpu, torch.float32), cpu)
    known = entries(folder)
    assert len(known) == 3, "q, k and v of two layers, and embeddings"
    times = [entry.stat().st_mtime_ns for entry in known]
    assert torch.equal(logits(model(path, cpu, torch.float32), cpu), first)
    assert entries(folder) == known and [entry.stat().st_mtime_ns for entry in known] == times
    other = tiny_gguf(tmp_path, source, "Q8_0", kinds={"token_embd": "Q6_K"})
    logits(model(other, cpu, torch.float32), cpu)
    assert len(entries(folder)) == 4, "another file's"


def bits(path: Path, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    found = dict(GGUFCheckpoint(path).stored((), dtype))
    assert all(isinstance(tensor, torch.Tensor) for tensor in found.values())
    return {name: tensor.to(dtype or tensor.dtype).view(torch.uint8) for name, tensor in found.items()}  # type: ignore[union-attr]


def no_widening(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise AssertionError("widened again")

    monkeypatch.setattr(gguf.gguf, "dequantize", fails)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("quant", ["Q4_0", "Q8_0"])
def test_widened_tensors(
    folder: Path, tmp_path: Path, dtype: torch.dtype, quant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit what they are without being kept, in the dtype asked for, and widened once."""
    path = tiny_gguf(tmp_path, tiny_checkpoint(tmp_path, num_hidden_layers=2, hidden_size=96), quant)
    plain = {name: tensor.to(dtype).view(torch.uint8) for name, tensor in GGUFCheckpoint(path).tensors()}
    assert not folder.exists(), "who names no dtype keeps nothing"
    assert bits(path, dtype).keys() == plain.keys() and not folder.exists(), "small ones are not worth a file"
    monkeypatch.setattr(kept, "LEAST", 1)
    first = bits(path, dtype)
    matrices = sum(info.kind.name == quant for info in GGUFFile(path).tensors.values())
    assert len(entries(folder)) == matrices == 2 * 7 + 1
    size = sum(tensor.numel() for tensor in plain.values())
    assert sum(entry.stat().st_size for entry in entries(folder)) < size + 128 * matrices
    no_widening(monkeypatch)
    second = bits(path, dtype)
    for name, tensor in plain.items():
        assert torch.equal(first[name], tensor) and torch.equal(second[name], tensor), name
    with pytest.raises(AssertionError, match="widened again"):
        bits(path, torch.float64)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(AssertionError, match="widened again"):
        bits(path, dtype)


def test_widened_tensors_of_a_damaged_entry(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kept, "LEAST", 1)
    path = tiny_gguf(tmp_path, tiny_checkpoint(tmp_path, num_hidden_layers=1), "Q4_0")
    first = bits(path, torch.bfloat16)
    for entry in entries(folder):
        os.truncate(entry, entry.stat().st_size - 8)
    for again in (bits(path, torch.bfloat16), bits(path, torch.bfloat16)):
        assert all(torch.equal(again[name], tensor) for name, tensor in first.items())
    no_widening(monkeypatch)
    bits(path, torch.bfloat16)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "full"))
    monkeypatch.setattr(kept, "LEAST", 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 30))
    again = bits(path, torch.bfloat16)
    assert all(torch.equal(again[name], tensor) for name, tensor in first.items())
    assert not entries(tmp_path / "full/framework/weights")
    assert caplog.text.count("converted weights are not kept") == 1


@pytest.mark.parametrize(
    "backend",
    [TorchBackend(), CpuBackend(CpuOptions(gguf="widened")), CpuBackend(quantization="int8")],
    ids=["torch", "widened", "int8"],
)
def test_a_model_whose_weights_are_widened(
    folder: Path, tmp_path: Path, backend: KernelBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computes the same from the second start on, and widens nothing for it."""
    monkeypatch.setattr(kept, "LEAST", 1)
    path = tiny_gguf(tmp_path, tiny_checkpoint(tmp_path, num_hidden_layers=2), "Q4_1")
    first = logits(model(path, backend, torch.bfloat16), backend)
    no_widening(monkeypatch)
    assert torch.equal(logits(model(path, backend, torch.bfloat16), backend), first)


def test_an_engine_that_is_started_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "LEAST", 1)
    path = tiny_gguf(tmp_path, tiny_checkpoint(tmp_path, num_hidden_layers=2), "Q4_1")

    def answer() -> list[int]:
        with LLM(model=str(path), kernel="torch", dtype="bfloat16", kv_blocks=16) as llm:
            return list(llm.generate("a", SamplingParams(max_tokens=5, temperature=0))[0].token_ids)

    first = answer()
    assert entries(folder)
    no_widening(monkeypatch)
    assert answer() == first
