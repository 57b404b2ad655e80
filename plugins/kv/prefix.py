"""Names of blocks: a chain of hashes, so that a name stands for all tokens up to the end of its block."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b

import msgspec

from framework import Request

_KEY = "paged"
"""Where the chain is kept in `Request.state`: it is a function of the request alone, and outlives preemptions."""


class Prefixes:
    """Hashes of a request's full blocks. A hash is cryptographic: nobody can make a prompt that finds another's block.

    Salted by the model, the request's adapter and its `cache_salt`: only equals of all three share.
    """

    def __init__(self, model: str, block_size: int) -> None:
        self._model = model
        self._size = block_size

    def chain(self, request: Request, count: int) -> list[bytes]:
        """At least the first `count` names, each computed once in the request's life. Do not change."""
        chain: list[bytes] = request.state.setdefault(_KEY, [])
        if len(chain) < count:
            size, prompt, output = self._size, request.prompt, request.output
            name = chain[-1] if chain else self._root(request)
            for start in range(len(chain) * size, count * size, size):
                end, after = start + size, start - len(prompt)
                if end <= len(prompt):
                    tokens = prompt[start:end]
                elif after >= 0:
                    tokens = output[after : after + size]
                else:
                    tokens = [*prompt[start:], *output[: after + size]]
                name = blake2b(name + array("q", tokens).tobytes(), digest_size=16).digest()
                chain.append(name)
        return chain

    def hits(
        self,
        request: Request,
        most: int,
        find: Callable[[bytes], int | None],
        outside: Callable[[int], int] | None,
        known: Sequence[int | None] = (),
    ) -> tuple[int, list[int | None]]:
        """(first, blocks): how much of the request's first `most` blocks can be taken over: [first, first + len).

        Without a window, `known` are blocks found before, from the first on.
        With one, `outside(tokens)` says how many leading blocks nobody needs who goes on after so many tokens.
        """
        found = list(known)
        best = run = len(found)  # run: blocks found in a row up to here
        for count, name in enumerate(self.chain(request, most)[len(found) : most], len(found) + 1):
            block = find(name)
            if block is None and outside is None:
                break
            found.append(block)
            run = 0 if block is None else run + 1
            if outside is None or run >= count - outside(count * self._size):
                best = count
        first = outside(best * self._size) if outside is not None else 0
        return first, found[first:best]

    def share(self, parent: Request, child: Request) -> None:
        """The child begins with all of the parent's prompt."""
        known = self.chain(parent, 0)[: len(parent.prompt) // self._size]
        child.state.setdefault(_KEY, list(known))

    def _root(self, request: Request) -> bytes:
        return blake2b(msgspec.msgpack.encode((self._model, request.adapter, request.cache_salt))).digest()
