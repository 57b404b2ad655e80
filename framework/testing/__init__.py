"""Helpers for people who write plugins: run any scheduler or KV cache without a model, and have every step checked;
compare any kernel backend or sampler with what is exact.

    from framework.testing import CheckingExecutor, SchedulerConformance, Simulation, VirtualClock

- `CheckingExecutor` obeys plans as a GPU worker would, but instead of keys and values it remembers, for every slot of
  every block, which tokens were written there. A step that would read anything else than the request's own context is a
  `PlanFault`, and so is a plan that breaks its contract in any other way. Its output depends only on a request's seed
  and tokens: whatever the schedule, a request's output must be the same.
- `ScriptedExecutor` does the same and lets the prompt dictate the output (it repeats the prompt for ever), for tests of
  a server that need to know what comes.
- `SchedulerConformance`, `KVConformance`, `KernelConformance`, `SamplerConformance` and `ToolParserConformance` are
  classes to inherit from: with `provider = "mine"`, pytest checks what any scheduler, KV cache, kernel backend, sampler
  or tool parser must do.
- `Simulation` is the engine that the first two run in: a scheduler and a cache over the checking executor, and every
  step checked.
- `VirtualClock` is time that moves only when told, for simulations.

`--executor checking` and `--executor scripted` select them in a server. Nothing imports torch but the classes for
kernel backends and samplers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_PUBLIC = {
    "Client": "simulation",
    "KVConformance": "caches",
    "KernelConformance": "kernels",
    "SamplerConformance": "samplers",
    "SchedulerConformance": "schedulers",
    "Simulation": "simulation",
    "CheckingExecutor": "checking",
    "PlanFault": "memory",
    "RequestFailed": "checking",
    "StepFailed": "checking",
    "ScriptedExecutor": "scripted",
    "ToolParserConformance": "tool_parsers",
    "VirtualClock": "clock",
}
__all__ = [
    "CheckingExecutor",
    "Client",
    "KVConformance",
    "KernelConformance",
    "PlanFault",
    "RequestFailed",
    "SamplerConformance",
    "SchedulerConformance",
    "ScriptedExecutor",
    "Simulation",
    "StepFailed",
    "ToolParserConformance",
    "VirtualClock",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if TYPE_CHECKING:
    from .caches import KVConformance as KVConformance
    from .checking import CheckingExecutor as CheckingExecutor
    from .checking import RequestFailed as RequestFailed
    from .checking import StepFailed as StepFailed
    from .clock import VirtualClock as VirtualClock
    from .kernels import KernelConformance as KernelConformance
    from .memory import PlanFault as PlanFault
    from .samplers import SamplerConformance as SamplerConformance
    from .schedulers import SchedulerConformance as SchedulerConformance
    from .scripted import ScriptedExecutor as ScriptedExecutor
    from .simulation import Client as Client
    from .simulation import Simulation as Simulation
    from .tool_parsers import ToolParserConformance as ToolParserConformance
