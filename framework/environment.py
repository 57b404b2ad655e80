"""`framework env`: what a bug report needs, without secrets."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping

import psutil

from . import __version__, machine
from .errors import FrameworkError
from .machine import size

_LIBRARIES = (
    *("torch", "triton", "numpy", "tokenizers", "safetensors", "gguf", "huggingface_hub", "pydantic", "pluggy"),
    *("msgspec", "pyzmq", "fastapi", "uvicorn", "uvloop", "structlog", "opentelemetry-sdk", "prometheus-client"),
)
_CPU_FLAGS = (
    *("avx", "avx2", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "avx_vnni", "amx_tile", "amx_bf16"),
    *("amx_int8", "f16c", "fma", "asimd", "bf16", "i8mm", "sve"),
)
_VARIABLES = re.compile(r"^(FRAMEWORK|HF)_|^((OMP|GOMP|KMP)_\w+|MKL_NUM_THREADS|CUDA_VISIBLE_DEVICES|TORCH_\w+)$")
_SECRET = re.compile(r"(token|key|secret|passw|auth|header|credential)", re.IGNORECASE)


def report() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """(section, rows of (name, value)) for every section."""
    yield (
        "versions",
        [
            ("framework", __version__),
            ("python", f"{platform.python_version()} ({sys.executable})"),
            *((name, _version(name)) for name in _LIBRARIES),
        ],
    )
    yield "machine", list(_machine())
    yield "devices", list(_devices())
    yield "plugins", list(_plugins())
    yield "settings", list(variables(os.environ)) or [("none", "no FRAMEWORK_* or HF_* variable is set")]


def variables(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The variables that matter, secrets masked."""
    for name, value in sorted(environment.items()):
        if _VARIABLES.search(name):
            yield name, "***" if _SECRET.search(name) else mask(value)


def mask(text: str) -> str:
    """`text` without passwords in URLs and without what follows a name that sounds secret."""
    text = re.sub(r"(?<=://)[^/@\s]+(?=@)", "***", text)
    return re.sub(rf"({_SECRET.pattern}\w*[\"']?\s*[:=]\s*)(\"[^\"]*\"|'[^']*'|[^,&\s}}]+)", r"\1***", text, flags=re.I)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _machine() -> Iterator[tuple[str, str]]:
    yield "OS", platform.platform()
    yield "CPU", machine.cpu_name()
    flags = machine.cpu_flags()
    yield "CPU flags", " ".join(name for name in _CPU_FLAGS if name in flags) or "none of interest"
    allowed = (
        f"affinity allows {len(machine.allowed())} (cores: {len(machine.cores())}) and the cgroup {machine.cpus()}"
    )
    yield "CPUs", f"{os.cpu_count()}, of which {allowed}"
    threads, engine, server = machine.place(None)
    beside = "with the server" if server == engine else f"the server on {machine.list_cpus(server)}"
    yield "engine", f"{threads} thread{'s' * (threads != 1)} on {machine.list_cpus(engine)}, {beside}"
    memory = psutil.virtual_memory()
    free = f"{size(memory.available)} available, {size(machine.free_memory())} within the cgroup"
    yield "memory", f"{size(memory.total)}, {free}"
    yield "compiler", _compiler()


def _compiler() -> str:
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")):
        path = shutil.which(name)
        if path:
            done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
            return f"{(done.stdout or done.stderr).splitlines()[0]} ({path})"
    return "none found"


def _devices() -> Iterator[tuple[str, str]]:
    import torch  # takes a second, and nothing else of this module needs it

    yield "cpu", f"torch threads {torch.get_num_threads()}, {torch.backends.cpu.get_cpu_capability()}"
    yield "CUDA", f"{torch.version.cuda or 'not in this build of torch'}"
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        yield f"cuda:{index}", f"{device.name}, {size(device.total_memory)}, capability {device.major}.{device.minor}"


def _plugins() -> Iterator[tuple[str, str]]:
    from .registry import load_plugins

    try:
        plugins = load_plugins()
    except FrameworkError as error:  # a report about a broken plugin has to come out all the same
        yield "error", str(error)
        return
    yield from plugins.manifest.items()
    for provider in plugins.providers():
        yield f"{provider.kind} {provider.name}", " ".join(plugins.origin(provider))
