"""What an object keeps alive: for tests that it forgets."""

from __future__ import annotations

import gc
import types
from collections.abc import Iterator

_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType, types.FrameType)


def reachable(root: object) -> Iterator[object]:
    """Everything that an object refers to, directly or not, each once; code and modules are nobody's."""
    seen, todo = set[int](), [root]
    while todo:
        one = todo.pop()
        if id(one) not in seen and not isinstance(one, _CODE):
            seen.add(id(one))
            yield one
            todo += gc.get_referents(one)
            todo += one if isinstance(one, dict) else ()  # whose keys it does not name where they are texts
