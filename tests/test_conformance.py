"""The bundled schedulers and caches pass the conformance kit, and the kit can fail: broken plugins do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from framework.testing import KVConformance, SchedulerConformance


class TestFcfs(SchedulerConformance):
    provider = "fcfs"


class TestPriority(SchedulerConformance):
    provider = "priority"


class TestAging(SchedulerConformance):
    provider = "priority"
    options: ClassVar[Mapping[str, Any]] = {"aging": 0.02}


class TestFair(SchedulerConformance):
    provider = "fair"


class TestStatic(SchedulerConformance):
    provider = "static"


class TestFcfsContiguous(SchedulerConformance):
    provider = "fcfs"
    kv = "contiguous"


class TestPaged(KVConformance):
    provider = "paged"


class TestContiguous(KVConformance):
    provider = "contiguous"
