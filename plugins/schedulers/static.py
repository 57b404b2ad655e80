"""Static batching, the baseline that continuous batching is measured against."""

from __future__ import annotations

from collections.abc import Iterable

from framework import StepResult, View, Want, hookimpl


class Static:
    """Fill a batch in order of arrival, then admit nobody until its longest member has ended.

    The seats of those who end earlier stay idle: they are the padding of a classic padded batch. The token budget of
    one step must not limit the batch, so it goes on forming, over as many steps of prefill as that takes, until one of
    its members has sampled a token.
    """

    def __init__(self) -> None:
        self._sampled = False

    @hookimpl
    def admit(self, view: View) -> Iterable[Want]:
        if not view.running:
            self._sampled = False
        return () if self._sampled else (Want(request) for request in view.waiting)

    @hookimpl
    def step_done(self, result: StepResult) -> None:
        self._sampled = self._sampled or bool(result.tokens)
