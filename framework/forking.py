"""Several outputs for one prompt: its children share the parent's blocks once the prompt is computed."""

from __future__ import annotations

from collections.abc import Iterator

from .kv import KVCache
from .types import Request, Status
from .view import LiveView


def fork(parent: Request, view: LiveView, kv: KVCache, seats: int) -> Iterator[Request]:
    """The prompt is computed: the children share it. Each computes its last token again, for logits of its own. Yields
    those who run from now on. `seats`: how many of --max-num-seqs those who run and these may take.

    Before `publish`, which may give up what only they need. Who has no seat, or may not share, waits to start by
    itself, before new requests. The parent tells the prompt's log-probabilities for all.
    """
    for child in parent.children:
        view.hidden -= 1
        child.admitted_at = parent.admitted_at
        child.prompt_logprobs = None
        child.reached = child.computed = child.num_tokens - 1
        if len(view.running) < seats and child.computed and kv.fork(parent, child):
            child.status = Status.RUNNING
            view.running.append(child)
            yield child
        else:
            child.reached = child.computed = 0
            child.status = Status.PREEMPTED
            view.queued.add(child)
    parent.children = []


def decides(request: Request) -> bool:
    """Whether a result in flight decides how the request goes on: it has its last token, or children to fork off."""
    return request.num_tokens >= request.limit or bool(request.children and request.computed >= len(request.prompt))
