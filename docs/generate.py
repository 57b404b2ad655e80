"""Write docs/cli.md from the settings model and the command line, docs/fields.md from the models of requests:
`python docs/generate.py`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import typer
from framework.server.fields import Only
from framework.server.schemas import ChatRequest, CompletionRequest
from framework.server.tgi_schemas import NAMES, GenerateParameters, GenerateRequest
from pydantic import BaseModel

from framework.cli import app
from framework.flags import Flag, panels

TARGET = Path(__file__).with_name("cli.md")
FIELDS = Path(__file__).with_name("fields.md")
_FIELDS = """\
# Fields by dialect

<!-- Written by docs/generate.py from the models of requests; a test fails when it is out of date. -->

What becomes of each field: *taken*, in the ranges and with the defaults of [the HTTP API](http-api.md#fields) and
[the TGI dialect](tgi-api.md#fields); *refused*, with an error that names it, for any value but null and
those that are listed; *ignored*, as is every field that is not in this table. TGI's column has the name that a field
has there.

| field | `/v1/completions` | `/v1/chat/completions` | `/generate`, `/generate_stream`, `/` |
|---|---|---|---|
{rows}
"""
_TGI = {**NAMES, "echo": "return_full_text", "top_logprobs": "top_n_tokens", "truncate_prompt_tokens": "truncate"}
"""What is called otherwise there."""
_INTRODUCTION = """\
# Command line

<!-- Written by docs/generate.py from the settings model; a test fails when it is out of date. -->

| command | what it does |
|---|---|
{commands}

## Settings

Every setting below is a flag of `framework serve` and `framework generate` (which has no use for the groups
*Server* and *Tracing*), an environment variable and a key of the YAML file that `--config FILE` (or
`FRAMEWORK_CONFIG`) names.
Flags win over variables, variables over the file, the file over the defaults. The three spellings of one setting:

    framework serve --max-num-seqs 64 --scheduler priority --scheduler-opt aging=30
    FRAMEWORK_MAX_NUM_SEQS=64 FRAMEWORK_SCHEDULER=priority FRAMEWORK_SCHEDULER_OPT='{{"aging": 30}}' framework serve

    # settings.yaml
    max_num_seqs: 64
    scheduler: priority
    scheduler_opt: {{aging: 30}}

Options of providers (`--scheduler-opt`, `--kv-opt`, ...) merge key by key, in the same order of precedence;
`framework plugins show NAME` lists those of a provider. Values after `key=` are read as YAML: numbers, `true`, text.

A wrong setting ends start-up with exit code 2 and one line per problem that names the flag, variable or key. Other
exit codes: 1 for a failure later on, 130 for Ctrl-C.
"""

_OTHERS = {
    "generate": "Besides the settings:",
    "chat": (
        "Talks to a server that runs, this one or any other that speaks the OpenAI dialect. Its API key is that of\n"
        "the variable `FRAMEWORK_API_KEY`, or `OPENAI_API_KEY`. On a terminal the conversation goes on until Ctrl-D\n"
        "or `/exit`; Ctrl-C stops an answer, `/reset` forgets what was said, `/system TEXT` is the instruction from\n"
        "then on. With a message, or a pipe, there is one answer, on standard output alone."
    ),
}
"""Introductions of commands that have flags of their own."""


def render() -> str:
    """The whole page."""
    command = typer.main.get_command(app)
    names = [(name, (sub.help or "").splitlines()[0]) for name, sub in command.commands.items()]  # type: ignore[attr-defined]
    rows = [f"| `framework {name}` | {text} |" for name, text in names]
    parts = [_INTRODUCTION.format(commands="\n".join(rows))]
    for panel, options in panels():
        parts.append(
            f"### {panel}\n\n| flag | default | meaning |\n|---|---|---|\n" + "\n".join(map(_row, options)) + "\n"
        )
    settings = {name for _, options in panels() for option in options for name in (option.name, option.alias)}
    settings |= {"--config", "--help"}
    for name, introduction in _OTHERS.items():
        rows = []
        for parameter in command.commands[name].params:  # type: ignore[attr-defined]
            if parameter.param_type_name == "argument":
                rows.append(f"| `{parameter.name.upper()}` | {parameter.help} |")
            elif name == "chat" or not settings & set(parameter.opts):
                flags = "`, `".join([*parameter.opts, *parameter.secondary_opts])
                rows.append(f"| `{flags}` | {parameter.help} |")
        parts.append(
            f"## `framework {name}`\n\n{introduction}\n\n| flag | meaning |\n|---|---|\n" + "\n".join(rows) + "\n"
        )
    return "\n".join(parts)


def _row(option: Flag) -> str:
    metavar = f" {option.metavar}" if option.metavar else ""
    default = f"`{option.default}`" if option.default else ""
    description = re.sub(r"(?<!`)(--[a-z-]+)", r"`\1`", option.description)
    return f"| `{option.name}{metavar}` | {default} | {description} |"


def fields() -> str:
    """The whole page of fields."""
    openai = dict.fromkeys([*CompletionRequest.model_fields, *ChatRequest.model_fields])
    names = [(name, _TGI.get(name, name)) for name in openai]
    known = {name for _, name in names}
    tgi = [name for model in (GenerateRequest, GenerateParameters) for name in model.model_fields]
    names += [(name, name) for name in tgi if name not in known]
    rows = []
    for name, theirs in names:
        there = _becomes(theirs, GenerateRequest, GenerateParameters)
        if name != theirs and there != "ignored":
            there += f" as `{theirs}`"
        ours = (_becomes(name, CompletionRequest), _becomes(name, ChatRequest))
        rows.append(f"| `{name}` | {' | '.join((*ours, there))} |")
    return _FIELDS.format(rows="\n".join(rows))


def _becomes(name: str, *models: type[BaseModel]) -> str:
    found = next((model.model_fields[name] for model in models if name in model.model_fields), None)
    if found is None:
        return "ignored"
    only = next((one for one in found.metadata if isinstance(one, Only)), None)
    if only is None:
        return "taken"
    values = ", ".join(f"`{json.dumps(value)}`" for value in only.neutral)
    return f"refused but for {values}" if values else "refused"


if __name__ == "__main__":
    TARGET.write_text(render(), "utf-8")
    FIELDS.write_text(fields(), "utf-8")
