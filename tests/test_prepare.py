"""Requests that wait for what a plugin prepares are seen by nobody, delay nobody, and end as their plugin says."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from harness import Harness, Policy

from framework import InvalidRequest, ModelError, PluginError, Rejected, Request, Status, hookimpl


class Slow(Policy):
    """Requests with a `cache_salt` wait for a future of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.futures: dict[str, Future[None]] = {}

    @hookimpl
    def prepare(self, request: Request) -> Future[None] | None:
        if request.cache_salt == b"broken":
            raise ValueError("a plugin that fails")
        if request.cache_salt == b"no future":
            return 3  # type: ignore[return-value]
        if request.cache_salt == b"cancelled":
            future: Future[None] = Future()
            future.cancel()
            return future
        return self.futures.setdefault(request.id, Future()) if request.cache_salt else None


def waiting(n: int = 1) -> tuple[Harness, Slow]:
    policy = Slow()
    h = Harness(policy, blocks=32)
    h.add("slow", cache_salt=b"x", n=n)
    h.add("other")
    return h, policy


def test_others_go_on() -> None:
    h, policy = waiting()
    assert h["slow"].status is Status.HIDDEN
    for _ in range(10):
        h.step()
    assert h.outputs["other"] == h.alone("other") and not h.outputs.get("slow")
    assert h["slow"].status is Status.HIDDEN and h.engine.has_work
    policy.futures["slow"].set_result(None)
    h.run()
    assert h.outputs["slow"] == h.alone("slow")


def test_what_is_ready_does_not_wait() -> None:
    policy = Slow()
    policy.futures["slow"] = Future()
    policy.futures["slow"].set_result(None)
    h = Harness(policy)
    h.add("slow", cache_salt=b"x")
    assert h["slow"].status is Status.WAITING
    h.run()


INTERNAL = "the request could not be prepared; the server's log has the details"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (InvalidRequest("x", "a bad one"), ("a bad one", 400, None)),
        (Rejected("not now", 503, 2.5), ("not now", 503, 2.5)),
        (OSError("lost /secret/file"), (INTERNAL, 500, None)),
        (ModelError("of no client's business"), (INTERNAL, 500, None)),
    ],
)
def test_what_goes_wrong_ends_all_of_them(
    error: Exception, told: tuple[str, int, float | None], caplog: pytest.LogCaptureFixture
) -> None:
    h, policy = waiting(n=3)
    policy.futures["slow"].set_exception(error)
    outputs = h.engine.step()
    assert {(o.id, o.finish_reason, o.error, o.status, o.retry_after) for o in outputs if o.finish_reason} == {
        (id, "error", *told) for id in ("slow", "slow/1", "slow/2")
    }
    assert (str(error) in caplog.text) == (told[1] == 500), "what the client is not told, the log is"
    h.engine.abort(["other"])
    assert not h.engine.has_work and h.planner.view.total == 0


BROKEN = {b"broken": "ValueError", b"no future": "TypeError", b"cancelled": "CancelledError"}


@pytest.mark.parametrize("salt", BROKEN)
def test_a_plugin_that_fails(salt: bytes, caplog: pytest.LogCaptureFixture) -> None:
    h = Harness(Slow())
    h.add("slow", cache_salt=salt)
    [output] = h.engine.step()
    assert (output.error, output.status) == (INTERNAL, 500)
    assert h.planner.policy.faults == {"scheduler": 1}
    assert f"plugin 'scheduler' failed in prepare: {BROKEN[salt]}" in caplog.text
    assert not h.engine.has_work and h.planner.view.total == 0


@pytest.mark.parametrize("salt", BROKEN)
def test_a_plugin_that_fails_where_that_ends_the_engine(salt: bytes) -> None:
    h = Harness(Slow())
    h.planner.limits = h.planner.limits._replace(strict=True)
    h.add("slow", cache_salt=salt)
    with pytest.raises(PluginError, match="'scheduler' failed in prepare"):
        h.engine.step()


@pytest.mark.parametrize("first", ["slow", "slow/1", "slow/2"])
def test_aborts_while_it_waits(first: str) -> None:
    h, policy = waiting(n=3)
    h.abort(first)
    left = [id for id in ("slow", "slow/1", "slow/2") if id != first]
    assert all(h.engine.requests[id].status is Status.HIDDEN for id in left)
    policy.futures["slow"].set_result(None)
    h.run()
    assert {id: h.outputs[id] for id in left} == {id: h.alone(id) for id in left}
    h, policy = waiting(n=3)
    h.abort("slow", "slow/1", "slow/2", "other")
    policy.futures["slow"].set_result(None)
    assert h.engine.step() == [] and not h.engine.has_work and h.planner.view.total == 0
