"""One settings model: where values come from, which wins, and what is said about wrong ones."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from framework import ConfigError
from framework.flags import flags, with_settings
from framework.process import spawn
from framework.settings import Settings, host_blocks, parse_memory, unknown_variables


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of whoever runs the tests."""
    import os

    for name in list(os.environ):
        if name.startswith("FRAMEWORK_"):
            monkeypatch.delenv(name)


def write(folder: Path, text: str) -> Path:
    path = folder / "settings.yaml"
    path.write_text(text)
    return path


def test_flags_beat_variables_beat_the_file_beat_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, "max-num-seqs: 3\nblock_size: 8\nport: 1\nkv_memory: 0.5\n")
    monkeypatch.setenv("FRAMEWORK_BLOCK_SIZE", "32")
    monkeypatch.setenv("FRAMEWORK_PORT", "2")
    settings = Settings.load(file, port="3", host=None)
    assert (settings.port, settings.block_size, settings.max_num_seqs) == (3, 32, 3)
    assert (settings.kv_memory, settings.host) == ("0.5", "127.0.0.1")


def test_provider_options_merge_key_by_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, "scheduler_opt: {a: file, b: file, c: file}\nplugin: [one, two]\n")
    monkeypatch.setenv("FRAMEWORK_SCHEDULER_OPT", '{"b": "variable", "c": "variable"}')
    settings = Settings.load(file, scheduler_opt={"c": "flag"}, plugin=("three",))
    assert settings.scheduler_opt == {"a": "file", "b": "variable", "c": "flag"}
    assert settings.plugin == ("three",)


def test_names_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, names in (("tiny", ("tiny",)), ('["a", "b"]', ("a", "b")), ("[a", ("[a",))):
        monkeypatch.setenv("FRAMEWORK_SERVED_MODEL_NAME", value)
        assert Settings.load().served_model_name == names
    assert Settings.load(served_model_name=("c",)).served_model_name == ("c",)
    monkeypatch.delenv("FRAMEWORK_SERVED_MODEL_NAME")
    for text, names in (("served_model_name: x", ("x",)), ("served-model-name: [x, y]", ("x", "y"))):
        assert Settings.load(write(tmp_path, text)).served_model_name == names
    with pytest.raises(ConfigError, match="--served-model-name"):
        Settings.load(served_model_name=("a", ""))


def test_an_empty_variable_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRAMEWORK_PORT", "")
    assert Settings.load().port == 8000


def test_a_file_is_forgotten_after_the_load(tmp_path: Path) -> None:
    assert Settings.load(write(tmp_path, "port: 5")).port == 5
    assert Settings.load().port == Settings().port == 8000


def test_an_empty_file_is_fine(tmp_path: Path) -> None:
    assert Settings.load(write(tmp_path, "# nothing yet\n")).port == 8000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_num_seq: 3", "max_num_seq in {file}: unknown setting; did you mean max_num_seqs?"),
        ("frobnicate: 3", "frobnicate in {file}: unknown setting"),
        ("port: 70000", "port in {file}: must be less than or equal to 65535, got 70000"),
        ("port: eighty", "port in {file}: must be a valid integer, unable to parse string as an integer, got 'eighty'"),
        ("- port", "--config: {file} must hold a mapping such as `max_num_seqs: 64`"),
        ("port: [", "--config: {file} is not YAML"),
        ("dtype: fp16", "dtype in {file}: must be 'auto', 'bfloat16', 'float16' or 'float32', got 'fp16'"),
        ("scheduler_opt: 3", "scheduler_opt in {file}: must be a valid dictionary, got 3"),
        ("plugin: {{a: 1}}", "plugin in {file}: must be a list, got {{'a': 1}}"),
        ("seed: 9223372036854775808", "seed in {file}: must be less than or equal to 9223372036854775807"),
        ("scheduler_opt: {{a: 99999999999999999999}}", "scheduler_opt in {file}: must not hold an integer of more"),
        ("scheduler_opt: &a {{a: *a}}", "scheduler_opt in {file}: is nested too deeply"),
        ("port: " + "[" * 5000, "--config: {file} is nested too deeply"),
        ("port: 2020-99-99", "--config: {file} is not YAML: month must be in 1..12"),
        ("model: ''", "model in {file}: must not be empty"),
    ],
)
def test_each_problem_of_a_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path, text.replace("{{", "{").replace("}}", "}"))
    with pytest.raises(ConfigError) as caught:
        Settings.load(file)
    assert str(caught.value).startswith(message.format(file=file))
    assert len(str(caught.value).splitlines()) == 1


MANY = "9" * 20


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        *((f, MANY, "less than or equal to") for f in ("seed", "max_num_seqs", "max_num_batched_tokens", "block_size")),
        *((field, MANY, "less than or equal to") for field in ("kv_blocks", "max_model_len", "threads")),
        ("seed", "-" + MANY, "greater than or equal to -9223372036854775808, got '-99999999999999999999'"),
        ("threads", "1025", "less than or equal to 1024, got '1025'"),
        ("max_num_seqs", "9" * 5000, "integer"),
        ("kv_memory", "1e400GiB", "is not a size"),
        ("kv_memory", "1e300GiB" * 1000, "is not a size"),
        ("model", "a\udcffb", r"'a\udcffb' is not valid UTF-8"),
        ("plugin", ("a", "\udcff"), "is not valid UTF-8"),
        ("chat_template", Path("\udcff"), "is not valid UTF-8"),
        ("executor_opt", {"a": ["\udcff"]}, "is not valid UTF-8"),
        ("executor_opt", {"a": 2**64}, "must not hold an integer of more than 64 bits"),
        ("model", "", "must not be empty"),
        ("host", "", "must not be empty"),
        ("host", ".", "'.' is neither an address nor a host name"),
        ("host", "a" * 64, "is neither an address nor a host name"),
    ],
)
def test_values_that_nothing_could_use_are_refused_in_one_short_line(field: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.load(**{field: value})
    text = str(caught.value)
    assert text.startswith(f"--{field.replace('_', '-')}: ") and says in text
    assert len(text) < 300 and "\n" not in text


@pytest.mark.parametrize("host", ["localhost", "0.0.0.0", "::1", "::", "fe80::1%eth0", "münchen.example", "a-b.c_d"])
def test_hosts_of_every_form_are_taken(host: str) -> None:
    assert Settings.load(host=host).host == host


def test_the_widest_values_are_taken() -> None:
    settings = Settings.load(seed=str(-(2**63)), threads="1024", max_num_seqs="65536", executor_opt={"a": 2**64 - 1})
    assert (settings.seed, settings.threads, settings.max_num_seqs) == (-(2**63), 1024, 65536)


def test_one_plugin_needs_no_list(tmp_path: Path) -> None:
    assert Settings.load(write(tmp_path, "plugin: audit")).plugin == ("audit",)


def test_an_engine_that_cannot_be_told_its_settings_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    started: list[Any] = []
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: started.append(args))
    with pytest.raises(OverflowError):
        spawn(Settings.model_construct(executor_opt={"a": 2**64}))
    assert (started, list(tmp_path.iterdir())) == ([], [])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config: cannot read .*nowhere\.yaml: No such file"):
        Settings.load(tmp_path / "nowhere.yaml")


def test_problems_say_where_the_value_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, "block_size: 0")
    monkeypatch.setenv("FRAMEWORK_MAX_NUM_BATCHED_TOKENS", "many")
    with pytest.raises(ConfigError) as caught:
        Settings.load(file, max_num_seqs="0", kv_memory="lots")
    lines = str(caught.value).splitlines()
    assert sorted(line.split(":")[0] for line in lines) == [
        "--kv-memory",
        "--max-num-seqs",
        "FRAMEWORK_MAX_NUM_BATCHED_TOKENS",
        f"block_size in {file}",
    ]
    (memory,) = (line for line in lines if line.startswith("--kv-memory"))
    assert memory == "--kv-memory: 'lots' is not a size such as 2GiB or 512MB, nor a fraction such as 0.3"


def test_a_variable_that_is_not_json_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRAMEWORK_SCHEDULER_OPT", "aging=30")
    with pytest.raises(ConfigError, match=r"^FRAMEWORK_SCHEDULER_OPT: must be JSON"):
        Settings.load()


@pytest.mark.parametrize("value", ["[", "[" * 5000, "2020-99-99", "9" * 5000])
def test_an_option_that_is_no_yaml_is_named(value: str) -> None:
    command = with_settings(lambda settings: pytest.fail("not reached"))
    given: dict[str, Any] = {option.field: None for option in flags()}
    with pytest.raises(ConfigError, match=r"^--scheduler-opt: the value in 'a=.* is not a YAML value$") as caught:
        command(**given | {"config": None, "scheduler_opt": [f"a={value}"]})
    assert len(str(caught.value)) < 150


def test_a_variable_of_absurd_json_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRAMEWORK_SCHEDULER_OPT", "[" * 100_000)
    with pytest.raises(ConfigError, match=r"^FRAMEWORK_.*nested too deeply$"):
        Settings.load()


@pytest.mark.parametrize("name", ["HF_TOKEN", "HOME", "X", "LOGS"])
def test_far_names_are_not_suggested(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"FRAMEWORK_{name}", "x")
    assert unknown_variables() == [f"FRAMEWORK_{name} is no setting"]


def test_a_misspelt_variable_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRAMEWORK_MAX_NUM_SEQ", "3")
    monkeypatch.setenv("FRAMEWORK_CONFIG", "x.yaml")
    assert unknown_variables() == ["FRAMEWORK_MAX_NUM_SEQ is no setting; did you mean FRAMEWORK_MAX_NUM_SEQS?"]


@pytest.mark.parametrize(
    ("text", "value"),
    [("2GiB", 2 * 2**30), ("512MB", 512_000_000), ("1g", 2**30), ("0.9", 0.9), ("1.5 KiB", 1536), ("4096", 4096)],
)
def test_memory_sizes(text: str, value: float) -> None:
    parsed = parse_memory(text)
    assert parsed == value and type(parsed) is type(value)


@pytest.mark.parametrize("text", ["", "0", "4", "512", "-1GiB", "1.5", "2 bananas", "nan", "inf", "infGiB", "1e400"])
def test_bad_memory_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_memory(text)


def test_settings_survive_a_trip_to_another_process() -> None:
    settings = Settings.load(scheduler_opt={"a": 1}, plugin=["x"], chat_template="t.jinja", max_model_len=7)
    assert Settings(**settings.model_dump()) == settings


@pytest.mark.parametrize(
    ("space", "blocks"),
    [
        ("0", 0),
        ("0.0", 0),
        (" 0GiB", 0),
        (".0 mb", 0),
        ("0.25", 25),
        ("1.0", 100),
        ("10KiB", 10),
        ("1023", 0),
        ("0.001", 0),
    ],
)
def test_swap_space_in_blocks(space: str, blocks: int) -> None:
    assert host_blocks(space, 100, 1024) == blocks
    Settings(swap_space=space)


@pytest.mark.parametrize("space", ["much", ".", "0.0.0", "-0", "0 bananas"])
def test_a_swap_space_that_is_no_size_names_the_flag(space: str) -> None:
    with pytest.raises(ConfigError, match=f"--swap-space: '{space}' is not a size"):
        Settings.load(None, swap_space=space)


@pytest.mark.parametrize(
    ("text", "overlap", "prefix_cache"), [("on", "on", True), ("off", "off", True), ("Off", None, True)]
)
def test_on_and_off_of_a_file_are_words(tmp_path: Path, text: str, overlap: str | None, prefix_cache: bool) -> None:
    """YAML 1.1 takes them for booleans."""
    path = tmp_path / "framework.yaml"
    path.write_text(f"overlap: {text}\nprefix_cache: yes\nstrict_plugins: false\nkv_opt: {{a: off, b: true}}\n")
    if overlap is None:
        with pytest.raises(ConfigError, match=f"overlap in .*: must be 'auto', 'on' or 'off', got '{text}'"):
            Settings.load(path)
        return
    loaded = Settings.load(path)
    assert (loaded.overlap, loaded.prefix_cache, loaded.strict_plugins) == (overlap, prefix_cache, False)
    assert loaded.kv_opt == {"a": "off", "b": True}
    assert Settings.load(None, overlap=text == "on").overlap == overlap
