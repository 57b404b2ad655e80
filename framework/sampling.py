"""What samplers and logits processors see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from .types import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    import torch

    Largest = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class SampleBatch(Protocol):
    """The rows that are sampled in this step. Sequences are indexed by request; `owner[row]` is an index into them.

    `seeds` are unsigned 64-bit; random numbers must be a function of (seed, output index), so that a draw does not
    depend on who shares the batch, nor on preemption.
    """

    @property
    def ids(self) -> Sequence[str]: ...
    @property
    def params(self) -> Sequence[SamplingParams]: ...
    @property
    def seeds(self) -> np.ndarray[Any, Any]:
        """uint64 [requests]."""

    @property
    def owner(self) -> Sequence[int]: ...
    @property
    def output_len(self) -> Sequence[int]:
        """Output tokens before this step: the index of the token that is sampled now."""

    @property
    def added(self) -> Sequence[str]:
        """Requests that joined since the last call, resumed ones too."""

    @property
    def removed(self) -> Sequence[str]:
        """Requests that left since the last call, preempted ones too."""

    @property
    def likeliest(self) -> torch.Tensor | None:
        """int64 [rows]: the first of each row's likeliest tokens, after `process_logits`; None: not worked out."""

    @property
    def largest(self) -> Largest | None:
        """The kernel backend's operation of this name, see `KernelBackend.largest`: what a top-k or top-p needs of each
        row, in one pass over it. None: there is no backend."""

    @property
    def errors(self) -> dict[str, str]:
        """By id, for logits processors to fill in: why nothing may follow, where that is told to the client. All logits
        of its row must be -inf."""

    @property
    def extra(self) -> Sequence[dict[str, Any]]: ...
    def prompt_tokens(self, id: str) -> np.ndarray[Any, Any]:
        """int32; do not change."""

    def output_tokens(self, id: str) -> np.ndarray[Any, Any]:
        """int32; do not change."""


class Sampled(NamedTuple):
    """tokens: int64 [rows]. The executor adds log-probabilities from the unmodified logits.

    empty: bool [rows], where nothing that may be generated is left to choose from; those requests end with an error,
    whatever their tokens are. None: nowhere.
    """

    tokens: torch.Tensor
    empty: torch.Tensor | None = None
