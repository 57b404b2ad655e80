"""Converted weights of `--kernel cpu` that are kept between starts: found again, and only as they were made."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import tiny_checkpoint, tiny_gguf
from framework.plugins.kernels.cpu import weights
from framework.plugins.kernels.cpu.backend import CpuBackend
from framework.plugins.models.gguf_file import GGUFFile
from test_cpu_blocks import logits, model

SHAPES = [((3, 5, 16, 4), torch.int8), ((7,), torch.float16), ((2, 0), torch.uint8)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(weights, "SPARE", 0)
    return tmp_path / "cache" / "framework" / "weights"


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


def test_made_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Maker()
    for _ in range(3):
        assert same(weights.kept(["a"], SHAPES, make), 1)
    assert same(weights.kept(["a", "b"], SHAPES, make), 2), "what they depend on is another"
    monkeypatch.setattr(weights, "_code", lambda: "other code")
    assert same(weights.kept(["a"], SHAPES, make), 3)
    assert make.calls == len(entries(folder)) == 3
    found = weights.kept(["a"], SHAPES, make)
    found[0].fill_(99)
    assert same(weights.kept(["a"], SHAPES, make), 3), "writing to what is mapped leaves the file alone"


def test_by_many_at_once(folder: Path) -> None:
    make = Maker()

    def one(_: int) -> list[torch.Tensor]:
        return weights.kept(["a"], SHAPES, lambda tensors: [tensor.fill_(1) for tensor in tensors] and None)

    with ThreadPoolExecutor(4) as pool:  # as four processes would: the lock is on an open file
        assert all(same(found, 1) for found in pool.map(one, range(8)))
    assert len(entries(folder)) == 1
    weights.kept(["a"], SHAPES, make)
    assert not make.calls


@pytest.mark.parametrize("damage", ["cut short", "longer", "empty", "end", "a folder"])
def test_damaged_entries(folder: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    make = Maker()
    weights.kept(["a"], SHAPES, make)
    (entry,) = entries(folder)
    whole = entry.read_bytes()
    changed = {"cut short": whole[:-70], "longer": whole + b"x", "empty": b"", "end": whole[:-1] + b"\0"}
    entry.unlink()
    if damage == "a folder":
        entry.mkdir()
    else:
        entry.write_bytes(changed[damage])
    assert same(weights.kept(["a"], SHAPES, make), 2)
    assert entries(folder) == [entry], "nothing else is left"
    assert same(weights.kept(["a"], SHAPES, make), 3 if damage == "a folder" else 2)
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
        monkeypatch.setattr(weights, "SPARE", 1 << 30)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 30))
    else:

        def fails(_: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", fails)
    make = Maker()
    assert same(weights.kept(["a"], SHAPES, make), 1) and same(weights.kept(["a"], SHAPES, make), 2)
    assert caplog.text.count("converted weights are not kept") == 2
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
    """Only what has to be rounded is kept; both starts compute the same."""
    monkeypatch.setattr(weights, "LEAST", 1)
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
