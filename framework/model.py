"""What a model is to the core: its shape, its checkpoint, and one forward pass over a ragged batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from .kv import CacheSpec

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from .kernels import KernelBackend, Meta, Quantized
    from .tokenizer import Tokenizer


class ModelSpec(msgspec.Struct, frozen=True):
    """What start-up needs to know of a checkpoint before loading it. Read from its config without torch."""

    architecture: str
    """As in config.json's `architectures`, e.g. LlamaForCausalLM. GGUF files are translated to this."""
    vocab_size: int
    max_model_len: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    """The checkpoint's own dtype: a torch dtype's name."""
    windows: tuple[int | None, ...]
    """Per layer: the tokens a query sees, itself included; None: all before it."""
    config: dict[str, Any]
    """The whole config, in the keys of a Hugging Face config.json."""


class Checkpoint(ABC):
    """An opened checkpoint: config, tokenizer and weights. One subclass per file format.

    Everything but `tensors` works without importing torch, since the server process reads it too.
    """

    path: str
    """As the user gave it, for messages."""

    @classmethod
    @abstractmethod
    def opens(cls, path: Path) -> bool:
        """Whether this format is the one of the existing file or directory `path`. Cheap; formats are asked in the
        order in which they were loaded, and the first has it."""

    @abstractmethod
    def __init__(self, path: Path) -> None:
        """Read what is small (metadata, not weights). Raises `ModelError` for a damaged or unsupported checkpoint."""

    @property
    @abstractmethod
    def config(self) -> dict[str, Any]:
        """In the keys of a Hugging Face config.json."""

    @property
    @abstractmethod
    def generation_config(self) -> dict[str, Any]:
        """In the keys of generation_config.json; empty if there is none."""

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face parameter name, CPU tensor), memory-mapped where the format allows it; a consumer drops
        each before it takes the next. Those outside the layers come first: they are the largest, and what a consumer
        needs beside one is free again when the rest is there. Raises `ModelError` where a shard is missing or cut
        short."""

    def stored(
        self, formats: Collection[str], dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor | Quantized]]:
        """Like `tensors`, but matrices that are stored in one of `formats` as they are. By default there are none.

        dtype: what the consumer turns all others into. Those that have to be converted for it anyway may come in it,
        and may be kept so between starts.
        """
        yield from self.tensors()

    @property
    @abstractmethod
    def num_tensors(self) -> int:
        """How many `tensors` and `stored` yield: for the progress bar."""

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """A fresh tokenizer with the checkpoint's chat templates; `eos_token_ids` are those that its files name.
        Raises `ModelError` where there is none or it cannot be read."""


class Model(ABC):
    """A model bound to a kernel backend's operations.

    `architectures` lists the config names it serves. Built on the worker; weights arrive through `load`.
    """

    architectures: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    """Formats of the `Quantized` rows that `load` takes in place of tensors: the backend's, or none."""

    @classmethod
    @abstractmethod
    def spec(cls, config: dict[str, Any]) -> ModelSpec:
        """Read a config; raise `ModelError` naming the key it cannot serve. Must not import torch."""

    @abstractmethod
    def __init__(self, spec: ModelSpec, backend: KernelBackend, dtype: torch.dtype, device: torch.device) -> None: ...

    @abstractmethod
    def load(
        self, tensors: Iterable[tuple[str, torch.Tensor | Quantized]], progress: Callable[[], None] = lambda: None
    ) -> None:
        """Take every tensor, pack it through the backend; raise `ModelError` naming missing or unknown ones.

        `progress` is called once per tensor.
        """

    @abstractmethod
    def cache_spec(self, block_size: int) -> CacheSpec:
        """Which layers share a block table (`forward` gets their caches in this order), and the dtype of keys and
        values. Layers with different windows may share one: it then keeps what any of them sees."""

    @abstractmethod
    def states(self, tokens: torch.Tensor, positions: torch.Tensor, caches: list[Any], meta: Meta) -> torch.Tensor:
        """Ragged forward pass, up to the head.

        tokens, positions: int64 [T]. caches: one entry per layer, as `KernelBackend.allocate` made it. Returns what
        `logits` takes of the R rows of `meta.logits_rows` only, [R, hidden]: any rows of the batch, in order, not
        only last ones of requests.
        """

    @abstractmethod
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """The head: [R, hidden] -> [R, vocab], each row by itself. R may be 0. It may be asked for parts of what
        `states` returned, one after the other: the logits of all rows of a long prompt may be too many to hold."""

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, caches: list[Any], meta: Meta) -> torch.Tensor:
        """Both: logits [R, vocab] of the rows of `meta.logits_rows`."""
        return self.logits(self.states(tokens, positions, caches, meta))
