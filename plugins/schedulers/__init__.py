"""Schedulers: who runs next."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import BaseModel, Field

from framework import Provider, hookimpl

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class PriorityOptions(BaseModel, extra="forbid"):
    """Options of `priority`."""

    aging: Positive | None = Field(None, description="Seconds of waiting that count as one level; unset: no ageing.")


class FairOptions(BaseModel, extra="forbid"):
    """Options of `fair`."""

    weights: dict[str, Positive] = Field({}, description="Shares by tenant, a mapping; 1 for those not in it.")
    input_cost: Positive = Field(1.0, description="Service that a prompt token counts for.")
    output_cost: Positive = Field(2.0, description="Service that an output token counts for.")


def _fcfs() -> object:
    from .fcfs import Fcfs

    return Fcfs()


def _priority(options: PriorityOptions) -> object:
    from .priority import Priority

    return Priority(options)


def _fair(options: FairOptions) -> object:
    from .fair import Fair

    return Fair(options)


def _static() -> object:
    from .static import Static

    return Static()


@hookimpl
def providers() -> Iterable[Provider]:
    return [
        Provider("scheduler", "fcfs", _fcfs, summary="first come, first served; preempted requests return first"),
        Provider(
            "scheduler",
            "priority",
            _priority,
            PriorityOptions,
            summary="lowest `priority` first, preempting worse ones",
            uses=("priority",),
        ),
        Provider("scheduler", "fair", _fair, FairOptions, summary="equal or weighted shares of service for tenants"),
        Provider("scheduler", "static", _static, summary="a batch runs until its longest member ends: a baseline"),
    ]
