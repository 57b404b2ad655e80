"""The command line, run in this process except where the process itself is what matters."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import psutil
import pytest
from serving import eventually
from typer.testing import CliRunner

import framework
from framework import ConfigError, cli, registry
from framework.environment import mask, variables
from framework.flags import flags, panels
from framework.messages import EngineInfo
from framework.registry import load_plugins
from framework.settings import Settings
from framework.terminal import TerminalUI, banner, curl

pytestmark = pytest.mark.usefixtures("logging_restored")
WIDE = {"COLUMNS": "400", "NO_COLOR": "1"}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of whoever runs the tests."""
    for name in list(os.environ):
        if name.startswith("FRAMEWORK_"):
            monkeypatch.delenv(name)


def run(*arguments: str, **kwargs: Any) -> Any:
    return CliRunner(env=WIDE).invoke(cli.app, arguments, **kwargs)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """A front end that notes the settings it is given, in place of the HTTP server."""
    seen: list[Settings] = []

    class Entry:
        @staticmethod
        def load() -> Any:
            return lambda settings, plugins, ui: seen.append(settings)

    monkeypatch.setattr(cli, "entry_points", lambda group, name: (Entry,))
    return seen


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.output) == (0, f"framework {framework.__version__}\n")


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_help_is_grouped_and_complete(command: str) -> None:
    text = run(command, "--help").output
    places = []
    for panel, options in panels():
        if command == "generate" and panel in ("Server", "Tracing"):  # no HTTP, no requests to trace
            assert not [option.name for option in options if f"{option.name} " in text]
            continue
        places.append(text.index(f" {panel} ─"))
        for option in options:
            assert f"{option.name} " in text
            assert f"[env: {option.variable}]" in text
            if option.default:
                assert f"[default: {option.default}]" in text
    assert places == sorted(places)


def test_every_setting_has_a_flag_with_a_description() -> None:
    assert [option.field for option in flags()] == list(Settings.model_fields)
    assert all(option.description and option.panel != "Options" for option in flags())


def test_help_and_version_import_neither_torch_nor_a_web_framework() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from framework.cli import app\n"
        "for line in (['--version'], ['serve', '--help'], ['plugins'], ['plugins', 'show', 'fcfs']):\n"
        "    assert CliRunner().invoke(app, line).exit_code == 0, line\n"
        "print(sorted({'torch', 'fastapi', 'transformers', 'zmq'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_flags_beat_variables_beat_the_file(tmp_path: Path, served: list[Settings]) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("port: 1\nblock_size: 8\nmax_num_seqs: 3\nscheduler_opt: {a: 1, b: 1}\n")
    result = CliRunner(env={"FRAMEWORK_PORT": "2", "FRAMEWORK_BLOCK_SIZE": "32"}).invoke(
        cli.app,
        ["serve", "--config", str(file), "--port", "3", "--scheduler-opt", "b=2", "--scheduler-opt", "c=x y"],
    )
    assert result.exit_code == 0, result.output
    (settings,) = served
    assert (settings.port, settings.block_size, settings.max_num_seqs) == (3, 32, 3)
    assert settings.scheduler_opt == {"a": 1, "b": 2, "c": "x y"}


def test_the_model_may_be_an_argument(served: list[Settings]) -> None:
    for line in (["some/model"], ["--model", "some/model"], ["--port", "1", "some/model", "--model", "some/model"]):
        assert run("serve", *line).exit_code == 0 and served[-1].model == "some/model"
    assert run("serve", "mine", env={"FRAMEWORK_MODEL": "other"}).exit_code == 0 and served[-1].model == "mine"
    result = run("serve", "mine", "--model", "other")
    assert (result.exit_code, result.stderr) == (2, "error: MODEL is another spelling of --model: give one of them\n")


def test_switches_and_repeatable_flags(served: list[Settings]) -> None:
    line = "serve --strict-plugins --plugin b --plugin a --plugin-opt a.rate=0.5 --kv-opt on=true"
    assert run(*line.split()).exit_code == 0
    (settings,) = served
    assert settings.strict_plugins and settings.plugin == ("b", "a")
    assert settings.plugin_opt == {"a.rate": 0.5} and settings.kv_opt == {"on": True}


def test_nothing_given_means_the_defaults(served: list[Settings]) -> None:
    assert run("serve").exit_code == 0
    assert served == [Settings()]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--port 70000", "--port: must be less than or equal to 65535, got '70000'"),
        ("--max-num-seqs 0", "--max-num-seqs: must be greater than or equal to 1, got '0'"),
        ("--dtype fp16", "--dtype: must be 'auto', 'bfloat16', 'float16' or 'float32', got 'fp16'"),
        ("--kv-memory lots", "--kv-memory: 'lots' is not a size such as 2GiB or 512MB, nor a fraction such as 0.3"),
        ("--scheduler-opt aging", "--scheduler-opt: 'aging' is not key=value"),
        ("--scheduler-opt =3", "--scheduler-opt: '=3' is not key=value"),
        ("--scheduler-opt a=[", "--scheduler-opt: the value in 'a=[' is not a YAML value"),
        ("--config nowhere.yaml", "--config: cannot read nowhere.yaml: No such file or directory"),
    ],
)
def test_a_bad_setting_is_one_line_and_exit_code_2(served: list[Settings], line: str, message: str) -> None:
    result = run("serve", *line.split())
    assert (result.exit_code, result.stderr) == (2, f"error: {message}\n")
    assert not served


def test_an_unknown_flag_is_exit_code_2() -> None:
    result = run("serve", "--frobnicate")
    assert result.exit_code == 2 and "--frobnicate" in result.output


def test_a_misspelt_variable_is_a_warning(served: list[Settings]) -> None:
    result = CliRunner(env={"FRAMEWORK_PROT": "1"}).invoke(cli.app, ["serve"])
    assert result.exit_code == 0
    assert result.stderr == "warning: FRAMEWORK_PROT is no setting; did you mean FRAMEWORK_PORT?\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (framework.ConfigError("a"), 2),
        (framework.PluginError("a"), 2),
        (framework.ModelError("a"), 2),
        (framework.EngineDead("a"), 1),
    ],
)
def test_errors_have_no_traceback(monkeypatch: pytest.MonkeyPatch, error: Exception, code: int) -> None:
    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(registry, "load_plugins", fail)
    result = run("serve")
    assert (result.exit_code, result.stderr) == (code, "error: a\n")


def test_ctrl_c_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(registry, "load_plugins", interrupt)
    result = run("serve")
    assert (result.exit_code, result.output) == (130, "")


def test_plugins_lists_every_provider() -> None:
    lines = run("plugins").output.splitlines()
    assert lines[0].split() == ["kind", "name", "package", "summary"]
    cells = {tuple(line.split()[:4]) for line in lines[1:]}
    for provider in registry.load_plugins().providers():
        assert (provider.kind, provider.name, "framework", framework.__version__) in cells
        assert any(line.endswith(provider.summary) and provider.summary for line in lines), provider.name


def test_plugins_show_prints_options(monkeypatch: pytest.MonkeyPatch) -> None:
    from pydantic import BaseModel, Field

    class Options(BaseModel):
        aging: float = Field(30.0, ge=0, description="Seconds until a request counts as one level better.")
        share: float = Field(0.5, gt=0, le=1)
        tenants: list[str] = Field([], max_length=3)
        rate: Annotated[float, Field(gt=0)] | None = None
        weights: dict[str, Annotated[float, Field(gt=0)]] = {}
        mode: Literal["a", "b"] = "a"
        name: str

    provider = framework.Provider("scheduler", "mine", object, Options, summary="a test")

    class Plugin:
        @framework.hookimpl
        def providers(self) -> list[framework.Provider]:
            return [provider]

    load = registry.load_plugins
    monkeypatch.setattr(registry, "load_plugins", lambda: load(extra=[("mine", Plugin())]))
    lines = run("plugins", "show", "mine").output.splitlines()
    assert lines[0].startswith("scheduler mine (mine") and lines[1:3] == ["  a test", "  options:"]
    rows = [" ".join(line.split()) for line in lines[3:]]
    assert rows == [
        "aging float >= 0 default 30.0 Seconds until a request counts as one level better.",
        "share float > 0 <= 1 default 0.5",
        "tenants list[str] length <= 3 default []",
        "rate float > 0 or None default None",
        "weights dict[str, float > 0] default {}",
        "mode 'a' or 'b' default 'a'",
        "name str required",
    ]


def test_every_bundled_option_is_described() -> None:
    for provider in registry.load_plugins().providers():
        for option, info in getattr(provider.options, "model_fields", {}).items():
            assert info.description, f"{provider.name}: {option}"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("tool_parser", "available: auto, none, hermes, "),
        ("kernel", "available: auto, cpu, "),
        ("model", "available: auto, "),
        ("scheduler", "available: fair, "),
    ],
)
def test_unknown_names_are_told_all_that_may_stand_there(kind: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_plugins().get(kind, "nope")


def test_plugins_show_without_options_and_unknown() -> None:
    assert "no options" in run("plugins", "show", "fcfs").output
    result = run("plugins", "show", "nope")
    assert result.exit_code == 2 and "available: " in result.stderr and "fcfs" in result.stderr


def test_env_reports_without_secrets() -> None:
    env = {
        **WIDE,
        "HF_TOKEN": "hf_secret1",
        "FRAMEWORK_OTLP_ENDPOINT": "http://user:secret2@host:4318",
        "FRAMEWORK_PLUGIN_OPT": '{"a.api_key": "secret3", "a.rate": 5}',
        "HF_HOME": "/models",
    }
    result = CliRunner(env=env).invoke(cli.app, ["env"])
    assert result.exit_code == 0, result.output
    assert "secret" not in result.output
    for word in ("python", "torch", "CPU flags", "memory", "compiler", "scheduler fcfs", "/models", "host:4318"):
        assert word in result.output, word


def test_masking() -> None:
    assert dict(variables({"HF_TOKEN": "x", "PATH": "y", "FRAMEWORK_PORT": "1"})) == {
        "HF_TOKEN": "***",
        "FRAMEWORK_PORT": "1",
    }
    assert mask("max_num_batched=5") == "max_num_batched=5"
    assert mask('{"password": "a, b", "x": 1}') == '{"password": ***, "x": 1}'
    assert mask("api_key=abc&n=1") == "api_key=***&n=1"


def test_generate_prints_what_the_api_generates(tiny_llama: Path) -> None:
    flags = {"model": str(tiny_llama), "dtype": "float32", "kv_blocks": "64"}
    line = [word for field, value in flags.items() for word in (f"--{field.replace('_', '-')}", value)]
    greedy = {"max_tokens": 8, "temperature": 0}
    with framework.LLM(**flags) as llm:
        (answer,) = llm.chat([{"role": "user", "content": "hello"}], greedy)
        (raw,) = llm.generate("hello", greedy)
        (seeded,) = llm.generate("hello", {"max_tokens": 8, "temperature": 1.5, "seed": 7})
    line += ["--max-tokens", "8"]
    assert run("generate", "hello", "--temperature", "0", *line).stdout == f"{answer.text}\n"
    assert run("generate", "-", "--raw", "--temperature", "0", *line, input="hello\n").stdout == f"{raw.text}\n"
    drawn = run("generate", "hello", "--raw", "--temperature", "1.5", "--seed", "7", *line)
    assert drawn.stdout == f"{seeded.text}\n" and drawn.exit_code == 0


def test_generate_logs_as_it_is_told(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Faulty:
        @framework.hookimpl
        def request_done(self) -> None:
            raise ValueError("full disk")

    load = registry.load_plugins
    monkeypatch.setattr("framework.llm.load_plugins", lambda extra: load([("faulty", Faulty())]))
    line = ["generate", "hello", "--model", str(tiny_llama), "--kv-blocks", "8", "--max-tokens", "2"]
    told = [row for row in run(*line, "--log-format", "json").stderr.splitlines() if row.startswith("{")]
    (entry,) = map(json.loads, told)
    assert (entry["level"], entry["plugin"], entry["process"]) == ("error", "faulty", "generate")
    text = run(*line).stderr
    assert "plugin=faulty" in text and "ValueError: full disk" in text and "{'" not in text
    monkeypatch.setattr(Faulty, "request_done", framework.hookimpl(lambda self: None))
    assert run(*line, "--log-level", "error").stderr == "load weights ...\nwarm up ...\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--top-p 5", "top_p must be in (0, 1], got 5.0"),
        ("--stop=", 'stop must be made of non-empty strings, got [""]'),
        ("--model /nowhere/at/all", "--model /nowhere/at/all: no such file or directory"),
    ],
)
def test_generate_refuses_before_it_loads(line: str, message: str) -> None:
    result = run("generate", "hello", *line.split())
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"error: {message}\n")


@pytest.mark.parametrize("prompt", [["", "--raw"], [""], [" \n"], [" ", "--chat"], ["-"]])
def test_generate_refuses_an_empty_prompt(prompt: list[str]) -> None:
    result = run("generate", *prompt)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", "error: the prompt is empty\n")


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["early", "load weights"])
def test_ctrl_c_while_generate_loads(demo_model: Path, tmp_path: Path, moment: str) -> None:
    log = tmp_path / "stderr"
    line = [sys.executable, "-m", "framework", "generate", "hello", "--model", str(demo_model)]
    with log.open("w") as file:
        process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=file, start_new_session=True)
    try:
        eventually(lambda: psutil.Process(process.pid).cpu_times().user > 0.2 if moment == "early" else log.read_text())
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=5)
    finally:
        process.kill()
    assert (process.returncode, out) == (130, b"")
    assert log.read_text() in ("", "load weights ...\n")


INFO = EngineInfo(
    model="it's a model",
    architecture="LlamaForCausalLM",
    dtype="bfloat16",
    device="cpu",
    vocab_size=100,
    max_model_len=100,
    max_model_len_reason="pool",
    block_size=16,
    kv_blocks=21,
    block_bytes=1024,
    max_num_seqs=256,
    max_num_batched_tokens=2048,
    threads=2,
    providers={"kernel": "torch", "scheduler": "fcfs", "kv": "paged"},
    manifest={},
    notes=["A note."],
    quantization="int8",
    kv_dtype="int8",
    cpus=[0, 1, 4],
)


def shown_by_a_shell(line: str, **env: str) -> list[str]:
    """The arguments that `curl` gets."""
    command = line.replace("curl ", "printf '%s\\n' ", 1)
    return subprocess.run(
        ["sh", "-c", command], env=env, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def test_the_first_request_brings_the_key_of_its_shell() -> None:
    line = curl(INFO.model, "https://127.0.0.1:8000", True, "$FRAMEWORK_API_KEY")
    assert line in banner(INFO, "https://127.0.0.1:8000", True, "$FRAMEWORK_API_KEY")
    assert "Authorization: Bearer sk-1" in shown_by_a_shell(line, FRAMEWORK_API_KEY="sk-1")


def test_the_first_request_says_where_a_key_is_and_whom_to_trust() -> None:
    key, certificate = "<a key of $HOME's `keys`>", Path("/etc/it's mine.pem")
    line = curl(INFO.model, "https://127.0.0.1:8000", True, key, certificate=certificate)
    assert line in banner(INFO, "https://127.0.0.1:8000", True, key, certificate=certificate)
    words = shown_by_a_shell(line)
    assert words[words.index("--cacert") + 1] == str(certificate) and f"Authorization: Bearer {key}" in words


def test_banner() -> None:
    text = banner(INFO, "http://127.0.0.1:8000", chat=True)
    for part in (
        "it's a model (LlamaForCausalLM), bfloat16, weights in int8",
        "cpu, 2 threads on CPUs 0-1,4",
        "scheduler fcfs, kv paged, kernel torch",
        "21 blocks of 16 = 336 tokens in int8 (21.0 KiB); 3 requests of full length fit",
        "at most 100 tokens (all that the KV pool holds",
        "A note.",
        "http://127.0.0.1:8000/v1\n",
    ):
        assert part in text, part


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "recompute"),
        (
            {"host_blocks": 4, "copy_rate": 2.0**30, "compute_rate": 150.4},
            "auto, 4.0 KiB of swap space (moves 1.0 GiB/s, computes 150 tokens/s)",
        ),
        ({"host_blocks": 4, "preemption": "swap"}, "swap, 4.0 KiB of swap space"),
        ({"host_blocks": 4, "preemption": "recompute", "compute_rate": 7.0}, "recompute (computes 7 tokens/s)"),
    ],
)
def test_the_banner_says_what_becomes_of_preempted_requests(changes: dict[str, Any], line: str) -> None:
    info = msgspec.structs.replace(INFO, **changes)
    lines = banner(info, "http://h:1", chat=False).splitlines()
    assert [text.split(maxsplit=1)[1] for text in lines if text.startswith("  preempt")] == [line]


@pytest.mark.parametrize("chat", [True, False])
def test_the_curl_line_survives_a_shell(chat: bool) -> None:
    line = curl(INFO.model, "http://127.0.0.1:8000", chat)
    assert line in banner(INFO, "http://127.0.0.1:8000", chat).splitlines()[-1]
    words = shlex.split(line)
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/" + ("chat/completions" if chat else "completions")]
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == INFO.model and ("messages" in body) is chat


@pytest.mark.slow
def test_the_first_answer_makes_sense(demo_model: Path) -> None:
    """What a newcomer gets for the line in the banner, and for the README's: they ask the same."""
    with framework.LLM(str(demo_model), kv_blocks=64) as llm:
        for chat, word in ((True, "light"), (False, "plants")):
            words = shlex.split(curl("demo", "http://127.0.0.1:8000", chat))
            body = json.loads(words[words.index("-d") + 1])
            params = {"max_tokens": body["max_tokens"], "temperature": float(body["temperature"])}
            prompt = body["messages"] if chat else body["prompt"]
            (output,) = llm.chat(prompt, params) if chat else llm.generate(prompt, params)
            assert word in output.text, output.text
            question = prompt[0]["content"] if chat else prompt
            assert question in (Path(__file__).parents[1] / "README.md").read_text("utf-8")


def test_progress_without_a_terminal_is_a_line_per_stage(capsys: pytest.CaptureFixture[str]) -> None:
    with TerminalUI() as ui:
        for step in range(5):
            ui.progress("loading weights", step / 4)
        ui.progress("warming up", 0.0)
        ui.banner(INFO, "http://h:1", chat=False)
    out, err = capsys.readouterr()
    assert err == "loading weights ...\nwarming up ...\n" and "http://h:1/v1" in out


def test_progress_on_a_terminal_is_a_bar_that_goes_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with pytest.raises(KeyboardInterrupt), TerminalUI() as ui:
        ui.progress("loading weights", 0.5)
        raise KeyboardInterrupt
    err = capsys.readouterr().err
    assert "loading weights" in err and "50%" in err
    assert err.rstrip().endswith("\x1b[2K") or "\x1b[?25h" in err  # erased, cursor shown again
