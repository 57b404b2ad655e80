"""Metrics and traces. Importing this costs nothing: the libraries are loaded when a plugin is activated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from framework import Provider, hookimpl

if TYPE_CHECKING:
    from framework.settings import Settings

    from .otel import Otel
    from .prometheus import Prometheus


class OtelOptions(BaseModel):
    """Options of the `otel` plugin."""

    model_config = ConfigDict(extra="forbid")

    step_sampling: int = Field(
        100, ge=0, description="Trace every n-th step of the engine; 0: none. Requests are always traced."
    )


@hookimpl
def providers() -> Iterable[Provider]:
    return [
        Provider("plugin", "prometheus", _prometheus, summary="metrics at /metrics (always active)"),
        Provider(
            "plugin",
            "otel",
            _otel,
            OtelOptions,
            summary="OpenTelemetry spans of requests and steps (active with --otlp-endpoint)",
        ),
    ]


def _prometheus(settings: Settings) -> Prometheus:
    from .prometheus import Prometheus

    return Prometheus(vllm=settings.metrics_compat == "vllm")


def _otel(settings: Settings, options: OtelOptions) -> Otel:
    from .otel import Otel

    return Otel(settings, options)
