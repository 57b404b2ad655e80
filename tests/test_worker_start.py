"""How the torch executor starts: what it finds, how large its pool is, what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from driver import BLOCK, BLOCKS, build

from framework import ConfigError, ModelError
from framework.device import resolve_device, resolve_dtype


def test_start_reports_what_it_found(tiny_llama: Path) -> None:
    stages: list[tuple[str, float]] = []
    executor = build(tiny_llama)
    capacity = executor.start(lambda stage, share: stages.append((stage, share)))
    assert capacity.blocks == {"device": BLOCKS, "host": BLOCKS // 4}
    assert executor.compute_rate > 0 and executor.copy_rate > 0
    group = executor.cache_spec.groups[0]
    assert capacity.block_bytes == 2 * group.layers * group.kv_heads * group.head_dim * BLOCK * 4
    assert (executor.dtype_name, executor.backend_name, executor.threads) == ("float32", "torch", 1)
    assert executor.cache_spec.block_size == BLOCK and executor.device_name
    loading = [share for stage, share in stages if stage == "load weights"]
    assert loading == sorted(loading) and (loading[0], loading[-1]) == (0, 1)
    executor.stop()
    executor.stop()
    assert executor.model is None


def test_more_threads_than_cpus_are_noted(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("framework.machine.cpus", lambda: 2)
    monkeypatch.setattr("framework.machine.cores", lambda: [[0], [1]])
    noted = []
    for threads, told in ((1, "9"), (2, "9"), (3, "9"), (None, ""), (None, "0"), (None, "9" * 20)):
        monkeypatch.setenv("OMP_NUM_THREADS", told)
        executor = build(tiny_llama, threads=threads)
        monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
        executor.start()
        noted.append((executor.threads, [note.split(":")[0] for note in executor.notes]))
        executor.stop()
    assert noted == [
        (1, []), (2, []), (3, ["3 threads on 2 CPUs"]), (2, []), (2, []), (1024, ["1024 threads on 2 CPUs"]),
    ]  # fmt: skip


def test_pool_size(tiny_llama: Path) -> None:
    def blocks(**options: Any) -> int:
        executor = build(tiny_llama, **options)
        capacity = executor.start()
        executor.stop()
        return capacity.blocks["device"]

    group = {"kv_blocks": None, "max_num_seqs": 64}
    size = build(tiny_llama).start().block_bytes
    assert blocks(kv_blocks=5, kv_memory="0.9") == 5
    assert blocks(**group, kv_memory=f"{10 * size + size // 2}B") == 10
    # By default never more than all seats at full length could fill; a size that was asked for stays.
    assert blocks(kv_blocks=None, max_num_seqs=2) == 2 * 512 // BLOCK
    assert blocks(kv_blocks=None, max_num_seqs=2, max_model_len=30) == 2 * 8
    assert blocks(kv_blocks=None, max_num_seqs=2, max_model_len=30, kv_memory=f"{100 * size}B") == 100
    with pytest.raises(ConfigError, match=r"--kv-memory 4TiB: .* is more than the .* free"):
        blocks(**group, kv_memory="4TiB")
    with pytest.raises(ConfigError, match=rf"--kv-memory {size - 1}B: .* do not hold one KV block.*{size} bytes"):
        blocks(**group, kv_memory=f"{size - 1}B")
    with pytest.raises(ConfigError, match=r"--kv-blocks 1000000000: .* is more than the .* free"):
        blocks(kv_blocks=10**9)


def test_fraction_is_of_the_free_memory(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = build(tiny_llama).start().block_bytes
    monkeypatch.setattr("framework.machine.free_memory", lambda: 40 * size)
    for asked, expected in (("0.25", (10, 2)), ("1", (40, 0)), ("0.9", (36, 4)), (None, (12, 3))):
        blocks = build(tiny_llama, kv_blocks=None, kv_memory=asked).start().blocks
        assert (blocks["device"], blocks["host"]) == expected
    with pytest.raises(ConfigError, match=r"--swap-space 0.25: .* are more than the .* of host memory"):
        build(tiny_llama, kv_blocks=None, kv_memory="0.9", swap_space="0.25").start()


def test_threads(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--threads, then OMP_NUM_THREADS, then one for each core, within the quota."""
    monkeypatch.setattr("framework.machine.cpus", lambda: 3)
    monkeypatch.setattr("framework.machine.cores", lambda: [[0, 4], [1, 5], [2, 6], [3, 7]])
    before = torch.get_num_threads()
    for told, option, expected in (("", None, 3), ("2", None, 2), ("2", 1, 1)):
        monkeypatch.setenv("OMP_NUM_THREADS", told)
        executor = build(tiny_llama, threads=option)
        executor.start()
        assert executor.threads == torch.get_num_threads() == expected
    torch.set_num_threads(before)


def test_devices() -> None:
    assert resolve_device("cpu").type == "cpu"
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for name in ("gpu", "cuda:x", "meta", "cpu:0:1"):
        with pytest.raises(ConfigError, match=f"--device {name}: expected auto, cpu, cuda or cuda:N"):
            resolve_device(name)
    with pytest.raises(ConfigError, match="--device cuda:99"):
        resolve_device("cuda:99")


def test_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert resolve_dtype("float16", cpu) is torch.float16
    for native, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr("framework.device._has_bfloat16", lambda device, native=native: native)
        assert resolve_dtype("auto", cpu) is expected
    monkeypatch.undo()
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    native = "avx512_bf16" in flags or "amx_bf16" in flags
    assert resolve_dtype("auto", cpu) is (torch.bfloat16 if native else torch.float32)


def test_checkpoint_without_architecture(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = build(tiny_llama)
    monkeypatch.setitem(executor.checkpoint.config, "architectures", [])
    with pytest.raises(ModelError, match="architectures"):
        executor.start()
