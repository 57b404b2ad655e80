"""Structured output: masks the tokens that a request's grammar does not allow next.

Grammars are compiled by threads, once for all requests that have the same; requests wait for theirs unseen by policies.
What is kept of a request between steps is where its output stands in its grammar. That is only ever brought up to the
tokens that the host knows, so nothing is taken back when a step fails, nor when a request is preempted.

On a GPU the masks are made while the device computes the logits; elsewhere they take microseconds a row.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from framework import Request, SampleBatch, SamplingParams, StructuredOutputs, hookimpl, send
from framework.grammars import Compiler, Matcher, Vocabulary

if TYPE_CHECKING:
    import xgrammar

THREADS = 2
"""That compile: one grammar that takes long does not hold up the others."""
KEPT_BYTES = 256 * 2**20
"""Of compiled grammars that no request has, those used last."""
ALONE = 16
"""Rows whose masks one thread makes: for fewer, waking others takes longer."""
SLOW_ROW = 0.002
"""Seconds a row. If masks take longer, those of the next step are made one by one: to find whose grammar it is."""


class _Compiled(NamedTuple):
    grammar: xgrammar.CompiledGrammar
    size: int


class _Used(NamedTuple):
    """By the requests of these ids."""

    compiled: Future[_Compiled]
    users: set[str]


class StructuredOutput:
    """Holds the compiled grammars of unfinished requests and others that were used last, and a matcher for each request
    that has one."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._lock = Lock()
        self._compiler: Compiler | None = None
        self._jobs: SimpleQueue[tuple[Future[_Compiled], StructuredOutputs] | None] = SimpleQueue()
        self._threads: list[Thread] = []
        self._used: dict[StructuredOutputs, _Used] = {}
        self._idle: OrderedDict[StructuredOutputs, Future[_Compiled]] = OrderedDict()
        self._idle_bytes = 0
        self._matchers: dict[str, Matcher] = {}
        self._params: Sequence[SamplingParams] = ()
        self._rows: list[int] = []  # of the batch with these parameters: those that have a grammar
        self._mask = torch.empty(0, 0, dtype=torch.int32)
        self._slow = False
        self._filler: xgrammar.BatchGrammarMatcher | None = None

    @hookimpl
    def started(self, engine: Any) -> None:
        self._engine = engine

    @hookimpl
    def stopping(self) -> None:
        self._engine = None
        for _ in self._threads:
            self._jobs.put(None)

    @hookimpl
    def prepare(self, request: Request) -> Future[_Compiled] | None:
        wanted = request.params.structured_outputs
        if wanted is None:
            return None
        used = self._used.get(wanted)
        if used is None or (used.compiled.done() and used.compiled.exception() is not None):
            compiled = self._idle.pop(wanted, None)
            if compiled is None:
                compiled = Future()
                self._jobs.put((compiled, wanted))
                if len(self._threads) < THREADS:  # an executor's would be waited for when the interpreter ends
                    self._threads.append(Thread(target=self._work, name="grammar", daemon=True))
                    self._threads[-1].start()
            else:
                self._idle_bytes -= compiled.result().size
            used = self._used[wanted] = _Used(compiled, used.users if used else set())
        used.users.update(one.id for one in (request, *request.children))
        return used.compiled

    @hookimpl
    def request_done(self, request: Request) -> None:
        self._matchers.pop(request.id, None)
        wanted = request.params.structured_outputs
        used = None if wanted is None else self._used.get(wanted)
        if wanted is None or used is None:
            return
        used.users.discard(request.id)
        if used.users:
            return
        del self._used[wanted]
        if used.compiled.cancel() or not used.compiled.done() or used.compiled.exception() is not None:
            return
        self._idle[wanted] = used.compiled
        self._idle_bytes += used.compiled.result().size
        while self._idle_bytes > KEPT_BYTES:
            self._idle_bytes -= self._idle.popitem(last=False)[1].result().size

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            compiled, wanted = job
            if not compiled.set_running_or_notify_cancel():
                continue
            try:
                compiled.set_result(self._compile(wanted))
            except BaseException as error:  # noqa: BLE001 - whatever it is, the request that waits is told
                compiled.set_exception(error)

    def _compile(self, wanted: StructuredOutputs) -> _Compiled:
        with self._lock:
            if self._compiler is None:
                executor = self._engine.executor
                self._compiler = Compiler(Vocabulary.of(executor.checkpoint.tokenizer(), executor.spec.vocab_size))
        grammar = self._compiler.compile(wanted)
        return _Compiled(grammar, grammar.memory_size_bytes)

    @hookimpl
    def process_logits(self, logits: torch.Tensor, batch: SampleBatch) -> None:
        if batch.params is not self._params:
            self._params = batch.params
            wanted = [params.structured_outputs for params in batch.params]
            self._rows = [row for row, owner in enumerate(batch.owner) if wanted[owner] is not None]
        if self._rows:
            self._apply(logits, batch, {row: self._matcher(batch, batch.owner[row]) for row in self._rows})

    def _matcher(self, batch: SampleBatch, at: int) -> Matcher:
        """Where request `at` of the batch stands."""
        id, length, params = batch.ids[at], batch.output_len[at], batch.params[at]
        matcher = self._matchers.get(id)
        if matcher is None or matcher.known > length:
            assert params.structured_outputs is not None
            compiled = self._used[params.structured_outputs].compiled.result().grammar
            assert self._compiler is not None
            silent = self._compiler.vocabulary.silent
            stops = [*params.eos_token_ids, *filter(silent, params.stop_token_ids)]
            matcher = self._matchers[id] = Matcher(compiled, stops)
        if matcher.known < length:
            matcher.follow(batch.output_tokens(id)[matcher.known : length].tolist())
        return matcher

    def _apply(self, logits: torch.Tensor, batch: SampleBatch, matchers: dict[int, Matcher]) -> None:
        import xgrammar

        rows, vocab = logits.shape
        if self._mask.shape[0] < rows:
            self._mask = xgrammar.allocate_token_bitmask(rows, vocab)
        follow = []
        for row, matcher in matchers.items():
            if matcher.failed is None and matcher.ended:
                self._mask[row] = _only(matcher.stops, self._mask.shape[1])
            else:
                follow.append(row)
        begin = time.perf_counter()
        if len(follow) <= ALONE or self._slow:
            for row in follow:
                matchers[row].fill(self._mask, row)
        else:
            going = [row for row in follow if matchers[row].failed is None]
            self._filler = self._filler or xgrammar.BatchGrammarMatcher()
            self._filler.batch_fill_next_token_bitmask([matchers[row].state for row in going], self._mask, going)
        self._slow = time.perf_counter() - begin > len(follow) * SLOW_ROW
        for row in follow:
            if (why := matchers[row].failed) is not None:
                batch.errors[batch.ids[batch.owner[row]]] = why
                self._mask[row] = 0
        [mask] = send([self._mask[:rows].numpy()], logits.device)
        xgrammar.apply_token_bitmask_inplace(logits, mask, indices=list(matchers))


def _only(tokens: Iterable[int], words: int) -> torch.Tensor:
    """int32 [words]: the mask that lets these tokens through."""
    bits = np.zeros(32 * words, np.uint8)
    bits[list(tokens)] = 1
    return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))
