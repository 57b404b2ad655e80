"""Loaded by pytest wherever framework is installed: failures in the conformance kit show the values compared."""

import pytest

pytest.register_assert_rewrite(
    *(
        f"framework.testing.{name}"
        for name in ("caches", "choices", "kernels", "pool", "samplers", "schedulers", "simulation", "tool_parsers")
    )
)
