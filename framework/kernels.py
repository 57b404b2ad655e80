"""What a kernel backend is: an operation table, and the layouts of weights and cache pages that go with it.

Model code is written against `KernelBackend`'s methods and passes the step's `Meta` explicitly; there is no global
context. `framework.ops.ReferenceBackend` implements every operation in plain torch and is the oracle; a backend
subclasses it and overrides what it does better. Operations over the same packed weights or cache pages go together: a
class that changes a layout brings every operation that reads it (see LAYOUTS), and one that changes only operations
keeps the layout that it inherits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .kv import CacheGroup

if TYPE_CHECKING:
    import numpy as np
    import torch

OPS = (
    "embed",
    "linear",
    "qkv",
    "gate_up",
    "logits",
    "argmax",
    "largest",
    "decoder",
    "add_rmsnorm",
    "rope_store",
    "silu_mul",
    "attention",
    "copy_blocks",
    "all_reduce",
)
WEIGHT_OPS = ("embed", "linear", "qkv", "gate_up", "logits")
LAYOUTS = {
    "pack_quantized": ("linear", "embed"),
    "pack": ("linear",),  # the reference's other products go through it; what `pack` makes of "embed" is for `embed`
    "allocate": ("block_bytes", "rope_store", "attention", "copy_blocks"),
}
"""The reference's: see `KernelBackend.layouts`."""
PARTS = ("add_rmsnorm", "qkv", "rope_store", "attention", "linear", "gate_up", "silu_mul", "all_reduce")
"""What `decoder` is made of."""
WHOLES = {"decoder": PARTS, "pack_tied": ("pack",), "advance": ("prepare",)}
"""Below a class that overrides the method named first, one that brings a part of it gets `KernelBackend`'s back."""


class Support(NamedTuple):
    """Whether a backend can do something; `reason` says why not, for the start-up log."""

    ok: bool
    reason: str = ""


class Batch(NamedTuple):
    """One step's ragged batch on the host: what `prepare` turns into `Meta`. R requests, T tokens.

    starts: int32 [R], tokens already in the cache before this step. lens: int32 [R], new tokens, > 0, decodes (1 token)
    not necessarily first. tables: one int32 [R, max blocks] per cache group; entries beyond
    ceil((start + len) / block_size) are undefined, and those that lie wholly before the window name any block of the
    pool. samples: bool [R]. block_size: tokens per block. tokens, positions: int64 [T], what `Model.forward` gets, to
    be moved with the rest; None: they are moved by others.
    """

    starts: np.ndarray[Any, Any]
    lens: np.ndarray[Any, Any]
    tables: tuple[np.ndarray[Any, Any], ...]
    samples: np.ndarray[Any, Any]
    block_size: int
    tokens: np.ndarray[Any, Any] | None = None
    positions: np.ndarray[Any, Any] | None = None


class GraphLimits(NamedTuple):
    """The steps that a captured graph serves. rows: their requests, each with one new token that is sampled. columns:
    of each cache group's table. max_seq: most tokens of a request, the new one included. block_size: tokens per block.
    """

    rows: int
    columns: tuple[int, ...]
    max_seq: int
    block_size: int
    device: torch.device


class Meta:
    """A prepared batch: device tensors that operations read. Backends subclass it to add their own.

    cu_lens: int32 [R + 1], row offsets of the requests in the flat batch. seq_lens: int32 [R], cached plus new tokens.
    slots: int64 [T] per group, block * block_size + offset of every new token. tables: int32 [R, blocks] per group.
    logits_rows: int64, flat rows whose logits are wanted: `prepare` names those that are sampled, and the executor may
    name others, in order, before the forward pass. max_len, max_seq: largest of lens and seq_lens. tokens, positions:
    int64 [T], those of the batch, if it has them. limits: of the graph whose inputs these are; None: of no graph.
    """

    cu_lens: torch.Tensor
    seq_lens: torch.Tensor
    slots: tuple[torch.Tensor, ...]
    tables: tuple[torch.Tensor, ...]
    logits_rows: torch.Tensor
    max_len: int
    max_seq: int
    batch: Batch
    tokens: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    limits: GraphLimits | None = None
    lines: torch.Tensor | None = None
    """How `framework.ReferenceBackend` lays a graph's inputs out."""


class Rope(NamedTuple):
    """cos, sin: float32 [max positions, rotary_dim / 2], scaling applied. Half-rotation (NeoX) layout."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(eq=False, slots=True)
class DecoderLayer:
    """One pre-norm layer with a gated MLP: weights as `pack` made them, norms as plain tensors. q_norm, k_norm: over
    each head, None if the model has none. window: tokens that a query sees, itself included; None: all before it."""

    window: int | None
    input_norm: Any = None
    qkv: Any = None
    q_norm: Any = None
    k_norm: Any = None
    o: Any = None
    post_norm: Any = None
    gate_up: Any = None
    down: Any = None


@dataclass(eq=False, slots=True)
class Decoder:
    """All layers of a model. eps: of the norms. scale: of attention's scores. prepared: what a backend made of them."""

    layers: Sequence[DecoderLayer]
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scale: float
    prepared: Any = None


class Quantized(NamedTuple):
    """Rows of a matrix as a checkpoint stores them.

    format: the ggml type's name, such as "Q4_K". data: uint8 [rows, bytes of a row], contiguous; may be memory-mapped.
    columns: values of a row. widen: makes float32 [rows, columns] of such data. identity: text that no other rows have,
    whatever file they are read from; asking may take as long as reading the whole file.
    """

    format: str
    data: torch.Tensor
    columns: int
    widen: Callable[[torch.Tensor], torch.Tensor]
    identity: Callable[[], str]

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.columns

    def widened(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row, float32 [some rows, columns]), a few MB at a time."""
        step = max(1, (4 << 20) // self.columns)
        for first in range(0, self.data.shape[0], step):
            yield first, self.widen(self.data[first : first + step])


class KernelBackend(ABC):
    """Operations and layouts. Tensors: x [T, hidden]; T rows are tokens of the flat ragged batch.

    `weight: Any` is whatever `pack` returned, `cache: Any` an entry of what `allocate` returned: opaque to model code.
    Operations are called from one thread, under `torch.inference_mode`, and see every batch of their `Meta` once per
    layer.
    """

    name = ""
    block_sizes: tuple[int, ...] = ()
    """Block sizes it can serve; empty: any."""
    quantizations: tuple[str, ...] = ()
    """Values of `--quantization`, besides "none", that its `pack` obeys."""
    formats: tuple[str, ...] = ()
    """Formats of `Quantized` rows that `pack_quantized` takes: others are widened before they are packed. Who overrides
    `pack` in a backend that has some overrides both, or sets this to ()."""
    kv_dtypes: tuple[str, ...] = ()
    """Types of cache pages that it has, besides that of activations: `allocate` and `block_bytes` are given one."""
    graphs: Literal["none", "decode", "full"] = "none"
    """Which steps it can run as captured graphs."""
    layouts: Mapping[str, tuple[str, ...]] = LAYOUTS
    """Who overrides the method named first has to define the others as well, in the same class or below it."""
    declined: tuple[str, ...] = ()
    """Why `--kernel auto` did not take those asked before this one, "name: reason" each."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for whole, parts in WHOLES.items():
            order = [next(i for i, k in enumerate(cls.__mro__) if name in vars(k)) for name in (whole, *parts)]
            if min(order) < order[0]:  # a new part is to be used, so the whole is put together again
                setattr(cls, whole, getattr(KernelBackend, whole))
        for layout, readers in cls.layouts.items():
            first = next(k for k in cls.__mro__ if layout in vars(k))
            above = first.__mro__[1:]
            stale = [r for r in readers if next(k for k in cls.__mro__ if r in vars(k)) in above]
            if stale:
                names = ", ".join(stale)
                raise TypeError(
                    f"{first.__qualname__} overrides {layout}, so {cls.__qualname__} needs {names} of its own: "
                    f"those inherited expect another layout (if they do not: `{stale[0]} = Base.{stale[0]}`)"
                )

    @abstractmethod
    def supports(
        self, op: str, dtype: torch.dtype, device: torch.device, *, head_dim: int = 64, window: int | None = None
    ) -> Support:
        """Whether `op`, one of OPS, can be served with activations of `dtype`. Asked at start-up for every operation
        and every window of the model (tokens a query sees, itself included; None: all before it)."""

    # Layouts

    @abstractmethod
    def pack(self, op: str, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        """Once per weight, after loading (and sharding). weight: [out, in] ([vocab, hidden] for embed and logits);
        `op` is one of WEIGHT_OPS. May return its argument."""

    def pack_tied(self, weight: torch.Tensor) -> tuple[Any, Any]:
        """Like `pack`, of the weight that both embed and logits have, each in a form of its own; who can read rows out
        of the packed head returns that twice. Below a class that overrides it, one that brings a `pack` of its own gets
        this one back."""
        return self.pack("embed", weight), self.pack("logits", weight)

    def pack_quantized(
        self, op: str, parts: Sequence[Quantized], dtype: torch.dtype, bias: torch.Tensor | None = None
    ) -> Any:
        """Like `pack`, of a weight whose rows are those of `parts`, one after the other, each in any of `formats`.
        dtype: that of activations. What it makes for logits serves embed, too. Only who has `formats` is asked."""
        raise NotImplementedError(f"{type(self).__qualname__} has formats {self.formats}, but no pack_quantized")

    @abstractmethod
    def block_bytes(self, group: CacheGroup, dtype: torch.dtype, block_size: int) -> int:
        """Bytes of one block over all layers of the group."""

    @abstractmethod
    def allocate(
        self,
        group: CacheGroup,
        dtype: torch.dtype,
        block_size: int,
        blocks: int,
        device: torch.device,
        pinned: bool = False,
    ) -> list[Any]:
        """The pool: one opaque cache per layer of the group. `pinned`: page-locked host memory, on a CPU device."""

    @abstractmethod
    def prepare(self, batch: Batch, device: torch.device, out: Meta | None = None) -> Meta:
        """Once per step, before the forward pass: what the operations of all layers need to know of the batch, moved to
        `device`; may be asynchronous. The batch's arrays are not changed before the step is over; then they may be, for
        the next (see `advance`), and what is made of them here is of no more use. `framework.send` moves several arrays
        in one copy.

        `out`: fill these buffers, which `graph_buffers` made, and return them. The batch is then of `out.limits.rows`
        requests with one token each, all sampled, and its tables may be narrower or wider than the buffers'. None
        unless `graphs` says that the backend has graphs.
        """

    def graph_buffers(self, limits: GraphLimits) -> Meta:
        """Inputs of a graph of the model's forward pass: a `Meta` whose tensors keep their addresses, and `limits`,
        `tokens` and `positions` set. Only asked if `graphs` is not "none". `framework.ReferenceBackend` makes and fills
        them for `prepare`'s own tensors; who adds some to them extends both.

        What the host knows (`max_len`, `max_seq`, `batch`) is read once, at the capture: max_seq is that of the limits,
        the batch holds nothing of use. All else operations take from the tensors, each time the graph runs: they keep
        nothing in `meta` that they worked out from them, which would be of the run before the capture.
        """
        raise NotImplementedError(f"{type(self).__qualname__} has graphs {self.graphs!r}, but no graph_buffers")

    def advance(self, batch: Batch, meta: Meta, device: torch.device, moved: bool) -> Meta:
        """What `prepare` would make of `batch`: the one that `meta`, of the step before, was made of, whose requests
        had one new token each, all sampled, and now have the next one. Its arrays were changed in place. moved: a table
        changed, or a new token begins a block. `meta` may be changed, and is of no more use; where it is a graph's
        inputs (`meta.limits`), it is filled again and returned.

        A class that overrides `prepare` gets this one back, if it brings none of its own.
        """
        return self.prepare(batch, device, None if meta.limits is None else meta)

    # Operations

    def decoder(
        self,
        x: torch.Tensor,
        decoder: Decoder,
        caches: Sequence[Any],
        positions: torch.Tensor,
        rope: Rope,
        group: int,
        meta: Meta,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """All layers: [T, hidden] -> two tensors of this shape whose sum is what comes out (None counts as 0), for the
        final `add_rmsnorm`. x may be overwritten.

        This is what it means, and a backend that has nothing better inherits it; one that overrides it still brings
        the operations that it is made of. Below a class that overrides it, one that brings a part of its own (see
        PARTS) gets this one back.
        """
        residual, sizes = None, (decoder.heads * decoder.head_dim, *2 * (decoder.kv_heads * decoder.head_dim,))
        for layer, cache in zip(decoder.layers, caches, strict=True):
            x, residual = self.add_rmsnorm(x, residual, layer.input_norm, decoder.eps)
            q, k, v = (y.view(y.shape[0], -1, decoder.head_dim) for y in self.qkv(x, layer.qkv, sizes))
            if layer.q_norm is not None:
                q, _ = self.add_rmsnorm(q, None, layer.q_norm, decoder.eps)
            if layer.k_norm is not None:
                k, _ = self.add_rmsnorm(k, None, layer.k_norm, decoder.eps)
            q = self.rope_store(q, k, v, positions, rope, cache, group, meta)
            x = self.attention(q, cache, group, meta, decoder.scale, layer.window)
            x = self.all_reduce(self.linear(x, layer.o))
            x, residual = self.add_rmsnorm(x, residual, layer.post_norm, decoder.eps)
            x = self.silu_mul(self.gate_up(x, layer.gate_up))
            x = self.all_reduce(self.linear(x, layer.down))
        return x, residual

    @abstractmethod
    def embed(self, tokens: torch.Tensor, weight: Any) -> torch.Tensor:
        """tokens int64 [T] -> [T, hidden]."""

    @abstractmethod
    def linear(self, x: torch.Tensor, weight: Any) -> torch.Tensor:
        """x @ weight.T (+ bias)."""

    @abstractmethod
    def qkv(self, x: torch.Tensor, weight: Any, sizes: tuple[int, int, int]) -> tuple[torch.Tensor, ...]:
        """One product with the three projections stacked: q [T, sizes[0]], k, v; views are allowed."""

    @abstractmethod
    def gate_up(self, x: torch.Tensor, weight: Any) -> torch.Tensor:
        """One product with gate and up stacked: [T, 2 * intermediate], gate first."""

    @abstractmethod
    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """[T, 2 * I] -> silu(x[:, :I]) * x[:, I:]."""

    @abstractmethod
    def add_rmsnorm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rmsnorm(x + residual) * weight, x + residual), over the last dimension; residual None counts as 0.

        Statistics in float32. `residual` may be overwritten. The weight is unpacked, [size of the last dimension].
        """

    @abstractmethod
    def rope_store(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        rope: Rope,
        cache: Any,
        group: int,
        meta: Meta,
    ) -> torch.Tensor:
        """Rotate q [T, heads, head_dim] and k [T, kv_heads, head_dim], write k and v to the cache; return rotated q.

        q and k may be changed in place.
        """

    @abstractmethod
    def attention(
        self, q: torch.Tensor, cache: Any, group: int, meta: Meta, scale: float, window: int | None
    ) -> torch.Tensor:
        """Causal attention of every new token over its request's cache -> [T, heads * head_dim]."""

    @abstractmethod
    def logits(self, x: torch.Tensor, weight: Any) -> torch.Tensor:
        """Of rows that `Meta.logits_rows` names, all or some: [R, hidden] -> [R, vocab], in the model's dtype or in
        float32."""

    @abstractmethod
    def argmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [R, vocab] -> int64 [R], the first of each row's likeliest tokens, and float32 [R], their logits: NaN
        where a row has one."""

    @abstractmethod
    def largest(
        self, x: torch.Tensor, counts: torch.Tensor, least: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of each row of x, float32 [R, vocab] without a NaN, what is not less than `least` (float32 [R]), nor than the
        row's counts-th largest (int64 [R], not negative; 0, or more than the vocabulary: all): all equals of the last.

        int64 columns and float32 values, those of a row in order of column and behind those of the row before; and
        int64 [R], how many there are of each.
        """

    @abstractmethod
    def copy_blocks(self, caches: list[Any], src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copy blocks src[i] to dst[i] (int64, on the host) in every layer, as if one after the other."""

    def move_blocks(self, sources: list[Any], targets: list[Any], pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block s of `sources` to block d of `targets` for each (s, d), no d twice, in every layer: between the
        device's pool and the host's, in either direction. In order with whatever else the device is asked to do.

        This works for caches that are sequences of tensors whose first dimension is blocks; others override it.
        """
        from .moving import move  # needs torch

        move(sources, targets, pairs)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over tensor-parallel ranks; one rank: the identity."""
        return x
