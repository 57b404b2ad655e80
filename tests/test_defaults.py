"""How settings become providers, and what is said about names and options that fit none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from framework.server.calls import select_parser
from pydantic import BaseModel, Field

from framework import (
    LLM,
    ConfigError,
    KernelBackend,
    ModelError,
    Provider,
    ReferenceBackend,
    SamplingParams,
    Support,
    hookimpl,
)
from framework.checkpoint import open_checkpoint
from framework.registry import Plugins, load_plugins
from framework.settings import Settings, selector


class Options(BaseModel):
    tile: int = Field(16, ge=1)


class Partial(ReferenceBackend):
    """Lacks an operation."""

    name = "partial"

    def supports(self, op: str, dtype: torch.dtype, device: torch.device, **about: Any) -> Support:
        return Support(op != "attention", "needs a tile of 16 tokens")


class Extra:
    @hookimpl
    def providers(self) -> list[Provider]:
        return [
            Provider("kernel", "partial", lambda: Partial()),
            Provider("kernel", "tiled", lambda options: ReferenceBackend(), Options),
            Provider("policy", "mine", object),
        ]


def build(model: Path, **flags: Any) -> LLM:
    return LLM(str(model), dtype="float32", kv_blocks=16, plugins=[("extra", Extra())], **flags)


def test_auto_takes_the_first_backend_that_can(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["partial", "tiled"]
    find = Plugins.providers

    def providers(self: Plugins, kind: str | None = None) -> list[Provider]:
        found = find(self, kind)
        return sorted(found, key=lambda p: p.name not in names) if kind == "kernel" else found

    monkeypatch.setattr(Plugins, "providers", providers)
    with build(tiny_llama) as llm:
        backend: KernelBackend = llm.engine.executor.backend  # type: ignore[attr-defined]
        assert type(backend) is ReferenceBackend
        assert llm.info.notes == ["--kernel auto passed over partial: attention: needs a tile of 16 tokens"]
    with pytest.raises(ConfigError, match=r"--kernel partial: attention: needs a tile of 16 tokens; auto takes"):
        build(tiny_llama, kernel="partial")


def test_options_of_a_backend_need_its_name(tiny_llama: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--kernel-opt tile: options are those of one backend; name it, such as --kernel tiled$"
    ):
        build(tiny_llama, kernel_opt={"tile": 32})
    with pytest.raises(ConfigError, match=r"--kernel-opt tyle: kernel 'tiled' has no such option; it has: tile"):
        build(tiny_llama, kernel="tiled", kernel_opt={"tyle": 32})
    with build(tiny_llama, kernel="tiled", kernel_opt={"tile": 32}) as llm:
        assert len(llm.generate("a", SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2


def test_factories_are_given_what_the_documentation_says(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[1] / "docs/plugins.md").read_text("utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| `")]
    rows = [row for row in rows if len(row) == 5]
    documented = {row[0].strip("`"): set(re.findall(r"`(\w+)`", row[2])) for row in rows}
    given: dict[str, set[str]] = {}
    create = Plugins.create

    def spy(self: Plugins, kind: str, name: str, options: Any = None, **context: Any) -> Any:
        given[kind] = {"options", *context}
        return create(self, kind, name, options, **context)

    monkeypatch.setattr(Plugins, "create", spy)
    build(tiny_llama).close()
    settings, plugins = Settings(model=str(tiny_llama), tool_parser="hermes"), load_plugins()
    select_parser(settings, plugins, open_checkpoint(settings, plugins).tokenizer())
    assert given == documented
    flags = re.findall(r"`(--[\w-]+)`", " ".join(row[1] for row in rows))
    assert flags == [selector(row[0].strip("`")) for row in rows if "--" in row[1]]


def test_messages_name_the_flag_that_selects_or_sets(tiny_llama: Path) -> None:
    plugins = load_plugins([("extra", Extra())])
    for kind, said in (
        ("model", "--model-impl x: no such model; available: auto, llama"),
        ("kernel", "--kernel x: no such kernel; available: auto, cpu, flash, partial, tiled, torch, triton"),
        ("plugin", "--plugin x: no such plugin"),
        ("policy", "policy x: no such policy; available: mine"),
    ):
        with pytest.raises(ConfigError, match=f"^{said}"):
            plugins.get(kind, "x")
    for kind, name, said in (
        ("model", "llama", "model option rate: model 'llama' has no options"),
        ("plugin", "otel", r"--plugin-opt otel\.rate: plugin 'otel' has no such option; it has: step_sampling"),
        ("scheduler", "fcfs", "--scheduler-opt rate: scheduler 'fcfs' has no options"),
    ):
        with pytest.raises(ConfigError, match=f"^{said}"):
            plugins.create(kind, name, {"rate": 1})
    with pytest.raises(ConfigError, match=r"^--model-impl x: no such model"):
        build(tiny_llama, model_impl="x")


def test_an_unknown_architecture_lists_the_known() -> None:
    from framework.defaults import model_class
    from framework.settings import Settings

    with pytest.raises(ModelError, match=r"architecture Bert is not supported; supported: .*LlamaForCausalLM"):
        model_class(load_plugins(), Settings(), "Bert")
