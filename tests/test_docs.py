"""Documentation that can be wrong is checked."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from pathlib import Path

import pytest
from framework.server.schemas import ChatRequest, CompletionRequest
from framework.server.tgi_schemas import GenerateParameters, GenerateRequest

from framework.hookspecs import HOOKS, Hooks
from framework.tokenizer import compile_template

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def code_blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def test_what_is_written_by_the_code_is_fresh() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs/generate.py")
    assert spec and spec.loader
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    fresh = (ROOT / "docs/cli.md").read_text("utf-8") == generate.render()
    assert fresh, "docs/cli.md is out of date: run `python docs/generate.py`"
    page = (ROOT / "docs/fields.md").read_text("utf-8")
    assert page == generate.fields(), "docs/fields.md is out of date: run `python docs/generate.py`"
    for model in (CompletionRequest, ChatRequest, GenerateRequest, GenerateParameters):
        assert len(model.model_fields) > 3 and all(f"`{name}`" in page for name in model.model_fields)


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_documented(hook: str) -> None:
    text = getattr(Hooks, hook).__doc__
    assert re.match(r"(All processes|Engine|Worker|Server)\b", text), "says in which process it is called"
    assert re.search(r"\*(Collect|First result|Event)\.?\*", text), "says of which kind it is"
    example = text[text.index("::") + 2 :]
    assert "@hookimpl" in example and f"def {hook}(self" in example, "shows an example"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_in_the_documentation_is_python(page: Path) -> None:
    for block in code_blocks(page, "python"):
        ast.parse(block)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text("utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("language", ["python", "toml"])
def test_the_first_plugin_is_the_same_everywhere(language: str) -> None:
    """tests/test_packaging.py installs the one in docs/scheduler.md and serves with it."""
    (block,) = code_blocks(ROOT / "docs/scheduler.md", language)
    assert block in code_blocks(ROOT / "README.md", language)


def test_the_smallest_scheduler_has_fifteen_lines() -> None:
    (block,) = code_blocks(ROOT / "docs/scheduler.md", "python")
    assert len(block.splitlines()) <= 15


def test_every_framework_command_in_the_documentation_parses() -> None:
    """Unknown flags in examples are the first thing that rots."""
    from framework.flags import flags

    known = {option.name for option in flags()} | {"--config", "--version", "--help"}
    known |= {"--max-tokens", "--temperature", "--top-p", "--stop", "--chat", "--raw"}
    for page in PAGES:
        for line in re.findall(r"framework (?:serve|generate)\b[^\n`]*", page.read_text("utf-8")):
            for flag in re.findall(r"(?<=\s)--[a-z-]+", line):
                assert flag in known, f"{page.name}: {line}"


def test_the_template_for_tools_renders() -> None:
    (block,) = code_blocks(ROOT / "docs" / "http-api.md", "jinja")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    text = compile_template(block).render(messages=messages, tools=tools, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\n") and json.dumps(tools[0]) + "\n<|im_end|>\n<|im_start|>user\n" in text
    called = json.dumps(call["function"])
    assert text.endswith(
        f"<|im_start|>assistant\n\n<tool_call>{called}</tool_call><|im_end|>\n"
        "<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n"
    )
    assert compile_template(block).render(messages=messages[:1]) == "<|im_start|>user\n1 + 1?<|im_end|>\n"
