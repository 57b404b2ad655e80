"""Samplers: one token from each row of logits; and what changes logits before."""

from __future__ import annotations

from collections.abc import Iterable

from framework import Provider, hookimpl


def _default() -> object:
    from .default import DefaultSampler

    return DefaultSampler()


def _grammar() -> object:
    from .grammar import StructuredOutput

    return StructuredOutput()


@hookimpl
def providers() -> Iterable[Provider]:
    summary = "greedy, temperature, top-k, top-p, min-p, penalties, logit bias, min_tokens; seeded draws"
    return [
        Provider("sampler", "default", _default, summary=summary),
        Provider("plugin", "grammar", _grammar, summary="structured output, by xgrammar (always active)"),
    ]
