"""Time that moves only when told."""

from __future__ import annotations


class VirtualClock:
    """A `Clock` for simulations and tests: starts at 0 and stands still between calls of `advance`."""

    def __init__(self) -> None:
        self._ns = 0

    def ns(self) -> int:
        return self._ns

    def advance(self, seconds: float) -> None:
        """Raises ValueError if `seconds` is negative: time never goes back."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back: {seconds} s")
        self._ns += round(seconds * 1e9)
