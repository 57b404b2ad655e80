"""Stand-ins, on a CPU and in float64, for attention libraries that need a GPU.

Each has the signature of the real function (signatures.json; torch's own is inspected), refuses what that refuses, and
does what its documentation and sources say:

- flash_attn_varlen_func, flash_attn_with_kvcache, varlen_attn: query i of sq sees keys i + sk - sq - left to
  i + sk - sq + right of sk, a negative bound being none; `causal` is right = 0; of a block table, pages up to sk.
- flashinfer: of kv_len keys, query i of qo_len sees those with key + qo_len + window_left >= kv_len + i, and with
  `causal` key <= kv_len - qo_len + i; a decode has one query. kv_len is (pages - 1) * page_size + last_page_len.

They read whole pages, as some of the real ones do: scores of what is hidden are replaced, values are multiplied by 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from signatures import signature
from torch.nn.attention import varlen

REAL_VARLEN = varlen.varlen_attn
calls: list[str] = []
"""Names of the functions that were called, in order."""
running: list[str] = []
"""Of those that have not returned."""


def like(real: inspect.Signature, *inner: inspect.Signature) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a function a real signature. It gets what the caller passes, by name; what it has no parameter for has to be
    left at its default. `inner`: of what the real one passes everything on to."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for one in (real, *inner):
                given = one.bind(*args, **kwargs).arguments
            calls.append(function.__qualname__)
            running.append(function.__qualname__)
            try:
                return function(**given)
            finally:
                running.pop()

        call.__signature__ = real  # type: ignore[attr-defined]
        return call

    return decorate


def attend(
    q: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    queries: Sequence[int],
    tables: Sequence[torch.Tensor],
    lens: Sequence[int],
    scale: float,
    left: int,
    right: int,
) -> torch.Tensor:
    """q [T, heads, head_dim], rows queries[r] to queries[r + 1] of request r, over the first lens[r] tokens of pages
    [blocks, page_size, kv_heads, head_dim] that tables[r] names."""
    out = torch.empty_like(q)
    for begin, end, table, sk in zip(queries[:-1], queries[1:], tables, lens, strict=True):
        used = table[: -(-sk // pages[0].shape[1])].long()
        k, v = (x[used].flatten(0, 1).transpose(0, 1).double() for x in pages)
        x = q[begin:end].transpose(0, 1).double()
        k, v = (y.repeat_interleave(x.shape[0] // y.shape[0], 0) for y in (k, v))
        diagonal = torch.arange(end - begin)[:, None] + sk - (end - begin)
        key = torch.arange(k.shape[1])
        hidden = key.expand(end - begin, -1) >= sk
        hidden = hidden | (key < diagonal - left) if left >= 0 else hidden
        hidden = hidden | (key > diagonal + right) if right >= 0 else hidden
        scores = (x @ k.mT * scale).masked_fill(hidden, -torch.inf)
        out[begin:end] = (scores.softmax(-1) @ v).transpose(0, 1).to(q.dtype)
    return out


def check_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, rows: Mapping[str, torch.Tensor]
) -> None:
    """What flash-attn's C++ asks of its arguments, flash_api.cpp. rows: int32, one number for each request."""
    assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.float16, torch.bfloat16)
    assert all(x.stride(-1) == 1 for x in (q, k, v, table))
    assert q.shape[2] % 8 == 0 and q.shape[2] <= 256 and q.shape[1] % k.shape[2] == 0
    assert k.shape == v.shape and k.shape[3] == q.shape[2]
    assert table.dtype == torch.int32 and table.dim() == 2
    for name, x in rows.items():
        count = len(table) + name.startswith("cu_")
        assert x.dtype == torch.int32 and x.shape == (count,) and x.is_contiguous(), name


@like(signature("flash_attn/flash_attn_interface.py: flash_attn_varlen_func"))
def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    block_table: Any,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    check_kernel(q, k, v, block_table, {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k})
    assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    lens = cu_seqlens_k.diff().tolist()
    assert max_seqlen_q == max(cu_seqlens_q.diff()) and max_seqlen_k == max(lens)
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    right = 0 if causal else window_size[1]
    return attend(q, (k, v), cu_seqlens_q.tolist(), block_table, lens, scale, window_size[0], right)


@like(signature("hopper/flash_attn_interface.py: flash_attn_with_kvcache"))
def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    cache_seqlens: Any,
    page_table: Any,
    cu_seqlens_q: Any,
    max_seqlen_q: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    rows = {"cu_seqlens_q": cu_seqlens_q, "cache_seqlens": cache_seqlens}
    check_kernel(q, k_cache, v_cache, page_table, rows)
    assert max_seqlen_q == max(cu_seqlens_q.diff())
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    right, lens = 0 if causal else window_size[1], cache_seqlens.tolist()
    return attend(q, (k_cache, v_cache), cu_seqlens_q.tolist(), page_table, lens, scale, window_size[0], right)


@like(inspect.signature(REAL_VARLEN))
def varlen_attn(
    query: Any,
    key: Any,
    value: Any,
    cu_seq_q: Any,
    cu_seq_k: Any,
    max_q: int,
    max_k: int,
    seqused_k: Any,
    block_table: Any,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    rows = {"cu_seq_q": cu_seq_q, "cu_seq_k": cu_seq_k, "seqused_k": seqused_k}
    check_kernel(query, key, value, block_table, rows)
    assert enable_gqa or query.shape[1] == key.shape[2]
    assert key.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    lens = seqused_k.tolist()
    assert max_q == max(cu_seq_q.diff()) and max_k == max(lens)
    scale = query.shape[2] ** -0.5 if scale is None else scale
    return attend(query, (key, value), cu_seq_q.tolist(), block_table, lens, scale, *window_size)


class _Wrapper:
    workspace: torch.Tensor
    causal = False
    queries: list[int]

    def keep(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last: torch.Tensor,
        heads: tuple[int, ...],
        page_size: int,
        window_left: int,
        dtypes: tuple[Any, Any],
        scale: float | None,
    ) -> None:
        assert all(x.dtype == torch.int32 and x.device.type == "cpu" for x in (indptr, indices, last))
        assert len(indices) == indptr[-1] and indptr[0] == 0 and len(last) == len(indptr) - 1
        assert bool((last >= 1).all()) and bool((last <= page_size).all())
        assert heads[2] in (64, 128, 256, 512) and heads[0] % heads[1] == 0
        query, pages = dtypes[0], dtypes[0] if dtypes[1] is None else dtypes[1]
        assert query == pages and query in (torch.float16, torch.bfloat16)
        self.heads, self.page_size, self.window_left, self.dtype = heads, page_size, window_left, query
        self.tables = [indices[a:b] for a, b in pairwise(indptr.tolist())]
        self.lens = ((indptr.diff() - 1) * page_size + last).tolist()
        self.scale = heads[2] ** -0.5 if scale is None else scale

    def attend(self, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        heads, kv_heads, head_dim = self.heads
        assert q.dtype == pages[0].dtype == self.dtype and q.shape == (self.queries[-1], heads, head_dim)
        assert pages[0].shape[1:] == pages[1].shape[1:] == (self.page_size, kv_heads, head_dim)
        right = 0 if self.causal else -1
        return attend(q, pages, self.queries, self.tables, self.lens, self.scale, self.window_left, right)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    _file = "flashinfer/decode.py: BatchDecodeWithPagedKVCacheWrapper"

    @like(signature(f"{_file}.__init__"))
    def __init__(self, float_workspace_buffer: Any, kv_layout: str = "NHD", use_tensor_cores: bool = False) -> None:
        assert kv_layout == "NHD" and float_workspace_buffer.count_nonzero() == 0
        self.workspace, self.tensor_cores = float_workspace_buffer, use_tensor_cores

    @like(signature(f"{_file}.plan"), signature(f"{_file}._plan_impl"))
    def plan(
        self,
        indptr: Any,
        indices: Any,
        last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        window_left: int = -1,
        q_data_type: Any = torch.float16,
        kv_data_type: Any = None,
        sm_scale: float | None = None,
    ) -> None:
        sizes, dtypes = (num_qo_heads, num_kv_heads, head_dim), (q_data_type, kv_data_type)
        # DISPATCH_GQA_GROUP_SIZE; fewer in earlier versions.
        assert self.tensor_cores or num_qo_heads // num_kv_heads in (1, 2, 4, 8)
        self.queries = list(range(len(indptr)))
        self.keep(indptr, indices, last_page_len, sizes, page_size, window_left, dtypes, sm_scale)

    @like(signature(f"{_file}.run"))
    def run(self, q: Any, paged_kv_cache: Any) -> torch.Tensor:
        return self.attend(q, paged_kv_cache)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    _file = "flashinfer/prefill.py: BatchPrefillWithPagedKVCacheWrapper"

    @like(signature(f"{_file}.__init__"))
    def __init__(self, float_workspace_buffer: Any, kv_layout: str = "NHD") -> None:
        assert kv_layout == "NHD"
        self.workspace = float_workspace_buffer

    @like(signature(f"{_file}.plan"))
    def plan(
        self,
        qo_indptr: Any,
        paged_kv_indptr: Any,
        paged_kv_indices: Any,
        paged_kv_last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool = False,
        window_left: int = -1,
        q_data_type: Any = torch.float16,
        kv_data_type: Any = None,
        sm_scale: float | None = None,
    ) -> None:
        sizes, dtypes = (num_qo_heads, num_kv_heads, head_dim_qk), (q_data_type, kv_data_type)
        assert qo_indptr.dtype == torch.int32 and qo_indptr.device.type == "cpu"
        self.queries, self.causal, last = qo_indptr.tolist(), causal, paged_kv_last_page_len
        self.keep(paged_kv_indptr, paged_kv_indices, last, sizes, page_size, window_left, dtypes, sm_scale)

    @like(signature(f"{_file}.run"))
    def run(self, q: Any, paged_kv_cache: Any) -> torch.Tensor:
        return self.attend(q, paged_kv_cache)


MODULES: dict[str, tuple[str, dict[str, Any]]] = {
    "flash_attn": ("2.8.3", {"flash_attn_varlen_func": flash_attn_varlen_func}),
    "flash_attn_interface": ("", {"flash_attn_with_kvcache": flash_attn_with_kvcache}),
    "flashinfer": (
        "0.7.4",
        {
            "BatchDecodeWithPagedKVCacheWrapper": BatchDecodeWithPagedKVCacheWrapper,
            "BatchPrefillWithPagedKVCacheWrapper": BatchPrefillWithPagedKVCacheWrapper,
        },
    ),
    "flashinfer_jit_cache": ("", {}),
}


def module(name: str, version: str, contents: Mapping[str, Any]) -> ModuleType:
    found = ModuleType(name)
    found.__spec__ = ModuleSpec(name, None)
    found.__dict__.update(contents)
    if version:
        found.__dict__["__version__"] = version
    return found


@contextmanager
def installed(*names: str) -> Iterator[None]:
    """These of MODULES can be imported meanwhile; "torch": its varlen_attn runs on a CPU."""
    found = {name: module(name, *MODULES[name]) for name in names if name != "torch"}
    with ExitStack() as stack:
        stack.enter_context(patch.dict("sys.modules", found))
        if "torch" in names:
            stack.enter_context(patch.object(varlen, "varlen_attn", varlen_attn))
            stack.enter_context(patch.object(torch.backends.cuda, "is_flash_attention_available", lambda: True))
        yield
