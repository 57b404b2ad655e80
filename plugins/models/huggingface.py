"""Hugging Face directories: config.json, safetensors (one file or shards), tokenizer.json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from safetensors import SafetensorError, safe_open
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from framework import Checkpoint, ModelError, Tokenizer
from framework.checkpoint import expect

if TYPE_CHECKING:
    import torch

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_INDEX = "model.safetensors.index.json"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class _Token(msgspec.Struct):
    content: str
    single_word: bool | None = None
    lstrip: bool | None = None
    rstrip: bool | None = None
    normalized: bool | None = None
    special: bool | None = None


class _Template(msgspec.Struct):
    name: str
    template: str


_TOKENIZER_CONFIG = {
    **dict.fromkeys(_ROLES, str | _Token | None),
    "added_tokens_decoder": dict[int, _Token] | None,
    "chat_template": str | list[_Template] | dict[str, str] | None,
}


class HuggingFaceCheckpoint(Checkpoint):
    """A directory as transformers' `save_pretrained` writes it."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._dir = path
        self._config = self._json("config.json")
        self._files = self._weights()
        names = [name for some in self._files.values() for name in some]
        check_layers(self._config, names, f"--model {path}: config.json")

    @classmethod
    def opens(cls, path: Path) -> bool:
        return path.is_dir()

    @property
    def config(self) -> dict[str, Any]:
        return self._config

    @property
    def generation_config(self) -> dict[str, Any]:
        return self._json("generation_config.json", required=False)

    @property
    def num_tensors(self) -> int:
        return sum(len(names) for names in self._files.values())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for layered in (False, True):
            for file, names in self._files.items():
                some = [name for name in names if (_LAYER.match(name) is not None) == layered]
                if some:
                    with safe_open(file, framework="pt") as shard:
                        for name in some:
                            yield name, shard.get_tensor(name)

    def tokenizer(self) -> Tokenizer:
        # As in transformers, tokenizer.json alone says whether BOS and EOS are added.
        config = self._json("tokenizer_config.json", required=False)
        file = self._dir / "tokenizer.json"
        if not file.is_file():
            raise ModelError(
                f"--model {self.path}: no tokenizer.json; make one with transformers: "
                "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
            )
        try:
            backend = Backend.from_file(str(file))
        except Exception as exc:  # tokenizers raises nothing narrower for a file that it cannot read
            raise ModelError(f"{file}: not a tokenizer.json this version can read: {exc}") from exc
        expect(config, _TOKENIZER_CONFIG, f"--model {self.path}: tokenizer_config.json")
        special = {role: _text(config[role]) for role in _ROLES if config.get(role)}
        _add_tokens(backend, config.get("added_tokens_decoder") or {}, special)
        return Tokenizer(backend, special=special, chat_templates=self._templates(config))

    def _templates(self, config: Mapping[str, Any]) -> dict[str, str]:
        given = config.get("chat_template") or {}
        if isinstance(given, str):
            given = {"default": given}
        elif isinstance(given, list):
            given = {entry["name"]: entry["template"] for entry in given}
        files = {file.stem: file for file in self._dir.glob("additional_chat_templates/*.jinja")}
        if (file := self._dir / "chat_template.jinja").is_file():
            files["default"] = file
        return given | {name: _template(file) for name, file in files.items()}

    def _json(self, name: str, required: bool = True) -> dict[str, Any]:
        file = self._dir / name
        if not file.is_file():
            if required:
                raise ModelError(f"--model {self.path}: {self._why_no_config()}")
            return {}
        try:
            data = json.loads(file.read_text("utf-8"))
        except (ValueError, RecursionError) as exc:
            raise ModelError(f"{file}: not valid JSON ({exc}); download it again") from exc
        if not isinstance(data, dict):
            raise ModelError(f"{file}: expected a JSON object")
        return data

    def _why_no_config(self) -> str:
        files = sorted(self._dir.glob("*.gguf"))
        if files:
            return f"no config.json, but GGUF files; name one of them: --model {files[0]}"
        return "no config.json in this directory, so it is not a Hugging Face checkpoint"

    def _weights(self) -> dict[Path, list[str]]:
        """The tensors of each safetensors file, after checking that nothing is missing or cut short."""
        index = self._dir / _INDEX
        if index.is_file():
            data = self._json(_INDEX)
            expect(data, {"weight_map": dict[str, str] | None}, str(index))
            weight_map = data.get("weight_map")
            if not weight_map:
                raise ModelError(f"{index}: no weight_map; download it again")
            files = {self._dir / name: [] for name in sorted(set(weight_map.values()))}  # type: dict[Path, list[str]]
            for name, file in weight_map.items():
                files[self._dir / file].append(name)
        else:
            found = sorted(self._dir.glob("*.safetensors"))
            single = self._dir / "model.safetensors"
            files = {f: [] for f in ([single] if single in found else found)}
        if not files:
            pickles = [f.name for pattern in ("*.bin", "*.pt", "*.pth") for f in self._dir.glob(pattern)]
            if pickles:
                raise ModelError(
                    f"--model {self.path}: only pickle weights ({pickles[0]}), which can run code and are never "
                    "loaded; convert them to safetensors (transformers: model.save_pretrained(DIR))"
                )
            raise ModelError(f"--model {self.path}: no weights (*.safetensors) beside config.json; download them")
        for file, expected in files.items():
            if not file.is_file():
                raise ModelError(
                    f"--model {self.path}: {file.name} is missing, though {_INDEX} names it; download it again"
                )
            try:
                with safe_open(file, framework="numpy") as shard:
                    names = list(shard.keys())
            except (SafetensorError, OSError) as exc:
                raise ModelError(
                    f"--model {self.path}: {file.name} is damaged or cut short ({exc}); download it again"
                ) from exc
            absent = set(expected) - set(names)
            if absent:
                raise ModelError(
                    f"--model {self.path}: {file.name} lacks tensor {min(absent)}, though {_INDEX} names it; "
                    "download it again"
                )
            if not expected:
                files[file] = names
        return files


def check_layers(config: Mapping[str, Any], names: Iterable[str], where: str) -> None:
    """Refuse a config with more layers than there are tensors of: each would be built before its tensors were missed.
    `names` are those of Hugging Face. Raises `ModelError`."""
    found = len({match[1] for match in map(_LAYER.match, names) if match})
    layers = config.get("num_hidden_layers")
    if found and isinstance(layers, int) and layers > found:
        raise ModelError(
            f"{where}: num_hidden_layers is {layers}, but there are tensors of only {found} layers; "
            "download the checkpoint again"
        )


def _template(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as exc:
        raise ModelError(f"{file}: not UTF-8 text ({exc}); download it again") from None


def _text(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def _add_tokens(backend: Backend, listed: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Add what tokenizer_config.json lists and tokenizer.json lacks, as far as each gets the id it should have: an
    id beyond the model's embedding helps nobody."""
    have = {token.content for token in backend.get_added_tokens_decoder().values()}
    for id, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        token = entry["content"]
        known = backend.token_to_id(token)
        if token not in have and int(id) == (backend.get_vocab_size() if known is None else known):
            flags = {key: bool(entry.get(key)) for key in ("single_word", "lstrip", "rstrip", "normalized", "special")}
            backend.add_tokens([AddedToken(token, **flags)])
    known_special = [t for t in special.values() if t not in have and backend.token_to_id(t) is not None]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in known_special])
