"""Compiles the Triton kernels ahead of time and tells what they take: a process of its own, because triton is imported
here as it is on a GPU, not as its interpreter. Reads a JSON list of cases, writes a JSON list of reports.

A case: [architecture, kernel, dtype, KV dtype, constants, warps, stages].
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from framework.plugins.kernels.triton import attention, elementwise
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

POINTERS = {
    "attend": {
        "out": 0, "parts": "fp32", "sums": "fp32", "q": 0, "keys": 1, "values": 1,
        "tables": "i32", "cu_lens": "i32", "seq_lens": "i32",
    },
    "combine": {"out": 0, "parts": "fp32", "sums": "fp32", "cu_lens": "i32"},
    "rope_store": {
        "q": 0, "k": 0, "v": 0, "positions": "i64", "cos": "fp32", "sin": "fp32", "slots": "i64",
        "keys": 1, "values": 1,
    },
    "add_rmsnorm": {"out": 0, "residual": 0, "x": 0, "weight": 0},
    "silu_mul": {"out": 0, "x": 0},
}  # fmt: skip
"""0: the dtype of activations; 1: that of the cache."""
FLOATS = {"scale", "eps"}
ODD = {"requests", "columns", "window", "tokens", "rows"}
"""Numbers that are not taken for multiples of 16."""


def compile_one(case: list[Any]) -> dict[str, Any]:
    arch, name, dtype, cache, constants, warps, stages = case
    kernel = getattr(attention, name, None) or getattr(elementwise, name)
    kinds, signature, attrs = POINTERS[name], {}, {}
    for index, param in enumerate(kernel.arg_names):
        if param in constants:
            signature[param] = "constexpr"
            continue
        kind = kinds.get(param)
        if kind is not None:
            signature[param] = "*" + {0: dtype, 1: cache}.get(kind, kind)
        else:
            signature[param] = "fp32" if param in FLOATS else "i32"
        if kind is not None or param not in FLOATS | ODD:
            attrs[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attrs)
    target = GPUTarget("cuda", arch, 32)
    built = triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages})
    return {"shared": built.metadata.shared, **resources(built.asm["cubin"])}


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and its bytes of stack: what did not fit them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        done = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout)
    assert found, done.stdout
    return {"registers": int(found[1]), "spills": int(found[2])}


if __name__ == "__main__":
    print(json.dumps([compile_one(case) for case in json.load(sys.stdin)]))
