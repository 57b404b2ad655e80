"""How large the pool is on a device that has memory of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from driver import Driver, Spy, build, prompt
from fake_device import CPU, FakeDevice, installed
from framework.plugins.kernels.torch_backend import TorchBackend
from typer.testing import CliRunner

from framework import ConfigError
from framework.flags import with_settings
from framework.settings import Settings
from framework.sizing import largest_step

GIB = 1 << 30


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    """10 GiB, of which 3 are weights and what others have; a step takes 1."""
    device = FakeDevice(10 * GIB, used=3 * GIB, step=GIB)
    with installed(device):
        yield device


def blocks(model: Path, **options: Any) -> tuple[int, int]:
    """(blocks, bytes of one). The pool is not really made."""
    executor = build(model, **{"kv_blocks": None, "max_num_seqs": 2**16, "max_num_batched_tokens": 64, **options})
    with pytest.MonkeyPatch.context() as patch:
        allocate = executor._allocate
        patch.setattr(executor, "_allocate", lambda blocks, device: allocate(min(blocks, 200), device))
        capacity = executor.start()
    executor.stop()
    return capacity.blocks["device"], capacity.block_bytes


def test_a_fraction_is_of_all_memory_and_covers_weights_and_steps(tiny_llama: Path, device: FakeDevice) -> None:
    for asked, room in ((None, 5), ("0.9", 5), ("0.5", 1), ("1", 6), ("2GiB", 2)):
        found, size = blocks(tiny_llama, kv_memory=asked, swap_space="0")
        assert found == room * GIB // size
    assert device.released
    assert blocks(tiny_llama, kv_blocks=7)[0] == 7
    longest = 512 // 4
    assert blocks(tiny_llama, max_num_seqs=3)[0] == 3 * longest  # by default no more than could be used


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"kv_memory": "0.4"},
            "--kv-memory 0.4: 0 bytes beside the 4.0 GiB that weights and steps take do not",
        ),
        ({"kv_memory": "7GiB"}, "--kv-memory 7GiB: a KV pool of 7.0 GiB .* is more than the 6.0 GiB free; give less"),
        ({"kv_blocks": 10**7}, "--kv-blocks 10000000: .* is more than the 6.0 GiB free"),
    ],
)
def test_what_does_not_fit_is_said_with_numbers(
    tiny_llama: Path, device: FakeDevice, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        blocks(tiny_llama, **options)


def test_the_largest_step_is_run_to_see_what_it_takes(tiny_llama: Path, device: FakeDevice) -> None:
    """As many tokens and sampled requests as there may be, log-probabilities of the prompts, sampler and logits
    processors included; they hear later that those requests are gone."""
    spy = Spy()
    executor = build(tiny_llama, spy, max_num_batched_tokens=70, max_num_seqs=5, max_model_len=40)
    sizes: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        forward, scored = executor._forward, executor._scored

        def watched(inputs: Any) -> torch.Tensor:
            logits = forward(inputs)
            sizes.append((len(inputs[0]), len(logits)))
            return logits

        def watched_too(inputs: Any, scores: Any) -> Any:
            logits, found = scored(inputs, scores)
            sizes.append((len(inputs[0]), len(logits)))
            assert sorted(map(len, found.values())) == [26, 39]
            return logits, found

        patch.setattr(executor, "_forward", watched)
        patch.setattr(executor, "_scored", watched_too)
        executor.start()
    assert sizes[0] == (70, 5) and {rows for _, rows in sizes[1:]} == {1}
    [seen] = spy.seen
    assert [len(prompt) for prompt, _, _ in seen.values()] == [40, 27, 1, 1, 1]
    driver = Driver(executor)
    driver.add("a", prompt(5))
    driver.run("a", 2)
    assert spy.added[1] == ("a",) and set(spy.removed[1]) == set(seen) and spy.removed[2] == ()
    executor.stop()


def test_a_step_that_does_not_fit_names_its_flags(
    tiny_llama: Path, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def embed(self: TorchBackend, tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB.")

    monkeypatch.setattr(TorchBackend, "embed", embed)
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens 64 and --max-num-seqs 65536 does not fit.*lower"):
        blocks(tiny_llama)


def test_a_pool_that_the_device_does_not_give_names_its_flags(
    tiny_llama: Path, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free memory may be in pieces."""
    allocate = TorchBackend.allocate

    def limited(self: TorchBackend, group: Any, dtype: Any, size: int, blocks: int, *more: Any, **some: Any) -> Any:
        if blocks > 100:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return allocate(self, group, dtype, size, blocks, *more, **some)

    monkeypatch.setattr(TorchBackend, "allocate", limited)
    with pytest.raises(ConfigError, match=r"a KV pool of .* cannot be had \(CUDA out of memory.\); give less with"):
        blocks(tiny_llama, kv_blocks=101)


def test_a_largest_step_is_as_long_as_the_model_allows() -> None:
    for seqs, tokens, limit in ((1, 100, 30), (3, 100, 30), (200, 100, 30), (4, 1000, None)):
        settings = Settings(max_num_seqs=seqs, max_num_batched_tokens=tokens, max_model_len=limit, block_size=4)
        plan = largest_step(settings, 50, 2)
        lens = np.array([s.tokens for s in plan.slices])
        assert len(lens) == min(seqs, tokens) and lens.sum() == min(tokens, len(lens) * min(limit or 50, 50))
        assert lens.max() <= 50 and {len(s.deltas) for s in plan.slices} == {2} and all(s.samples for s in plan.slices)


def test_gpu_memory_utilization_is_another_name_of_the_flag() -> None:
    seen: list[Settings] = []
    app = typer.Typer()
    app.command()(with_settings(lambda settings: seen.append(settings)))
    for name in ("--gpu-memory-utilization", "--kv-memory"):
        assert CliRunner().invoke(app, [name, "0.8"]).exit_code == 0
    assert [settings.kv_memory for settings in seen] == ["0.8", "0.8"]
    both = CliRunner().invoke(app, ["--gpu-memory-utilization", "0.8", "--kv-memory", "0.7"])
    assert isinstance(both.exception, ConfigError) and "another name of --kv-memory" in str(both.exception)
    assert "gpu_memory_utilization" not in Settings.model_fields


def test_a_cpu_is_not_measured(tiny_llama: Path) -> None:
    stages: set[str] = set()
    executor = build(tiny_llama)
    executor.start(lambda stage, share: stages.add(stage))
    assert stages == {"load weights", "warm up"} and executor.device.torch == CPU
    executor.stop()


def test_the_other_name_serves_files_and_python_too(tmp_path: Path) -> None:
    path = tmp_path / "framework.yaml"
    path.write_text("gpu_memory_utilization: 0.8\n")
    assert Settings.load(path).kv_memory == "0.8"
    assert Settings.load(None, gpu_memory_utilization=0.7).kv_memory == "0.7"
    path.write_text("gpu-memory-utilization: 0.8\nkv-memory: 0.7\n")
    with pytest.raises(
        ConfigError, match=r"gpu_memory_utilization in .* is another name of kv_memory: give one of them"
    ):
        Settings.load(path)
