"""What policies read and answer: requests, sampling parameters, and the records of the hooks.

Nothing here imports torch: decisions are pure data, so that a laptop test, a simulator and a GPU run share them.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from .errors import InvalidRequest, quoted

if TYPE_CHECKING:
    from .kv import Usage
    from .plan import Logprobs

Json = Any
"""A value that JSON can hold."""

INT64 = 2**63


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the output must be: exactly one of the first six, by their names in vLLM's API."""

    json: str | dict[str, Any] | None = None
    """A JSON schema, as an object or as text."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    """One of these texts."""
    grammar: str | None = None
    """EBNF; its first rule is `root`."""
    structural_tag: str | dict[str, Any] | None = None
    """Free text with parts that follow schemas, in xgrammar's form."""
    disable_any_whitespace: bool = False
    """Of JSON: as compact as can be."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose the tokens of one request. Names and meanings are those of the OpenAI and vLLM APIs.

    `stop` is matched over text by whoever detokenises; everything else is applied by the engine.
    `eos_token_ids` is filled in from the checkpoint; `ignore_eos` empties its effect.
    """

    max_tokens: int | None = None
    """Most tokens to generate; None means what remains of the context."""
    min_tokens: int = 0
    """No EOS, stop id or stop string may end the request before this many tokens."""
    temperature: float = 1.0
    """0 is greedy (of equals the first); then top_p, top_k and min_p have no effect."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: off."""
    min_p: float = 0.0
    seed: int | None = None
    """int64. An unseeded request gets a recorded seed when it arrives."""
    repetition_penalty: float = 1.0
    """Over prompt and output tokens."""
    presence_penalty: float = 0.0
    """Over output tokens only."""
    frequency_penalty: float = 0.0
    """Over output tokens only."""
    logit_bias: dict[int, float] = {}
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    eos_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    """None: no log-probabilities; k: of the chosen token and of the k likeliest, from the unmodified logits."""
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    """None: none; k: of each prompt token but the first, and of the k likeliest in its place. The prompt is then
    computed whole, without what the prefix cache has of it."""
    allowed_token_ids: tuple[int, ...] = ()
    """Nothing else may be generated, EOS included; empty: everything may."""
    bad_words: tuple[str, ...] = ()
    """Texts that may not be generated. Whoever has a tokenizer turns them into `bad_token_ids`."""
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    """Sequences whose last token may not follow, in the output, the ones before it."""
    structured_outputs: StructuredOutputs | None = None

    MAX_LOGPROBS = 20
    MAX_BAD_WORDS = 1024
    MAX_BAD_SEQUENCES = 4 * MAX_BAD_WORDS
    """Of tokens: a word is spelt in several ways."""

    def check(self, vocab_size: int) -> None:
        """Raise `InvalidRequest`, naming the field, unless every value is in range for this vocabulary."""

        def need(ok: bool, field: str, rule: str) -> None:
            if not ok:
                raise InvalidRequest(field, f"{field} must be {rule}, got {quoted(getattr(self, field))}")

        def finite(field: str) -> bool:
            return math.isfinite(getattr(self, field))

        need(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1")
        need(
            self.min_tokens >= 0 and (self.max_tokens is None or self.min_tokens <= self.max_tokens),
            "min_tokens",
            f"between 0 and {self.max_tokens}, the most tokens to generate" if self.max_tokens else "0 or more",
        )
        need(finite("temperature") and self.temperature >= 0, "temperature", "a finite number, 0 or more")
        need(finite("top_p") and 0 < self.top_p <= 1, "top_p", "in (0, 1]")
        need(self.top_k >= -1, "top_k", "-1 (off), 0 (off) or more")
        need(finite("min_p") and 0 <= self.min_p <= 1, "min_p", "between 0 and 1")
        need(self.seed is None or -INT64 <= self.seed < INT64, "seed", "a signed 64-bit integer")
        need(
            finite("repetition_penalty") and self.repetition_penalty > 0,
            "repetition_penalty",
            "a finite number above 0",
        )
        for field in ("presence_penalty", "frequency_penalty"):
            need(finite(field) and -2 <= getattr(self, field) <= 2, field, "between -2 and 2")
        need(all(self.stop), "stop", "made of non-empty strings")
        for token, bias in self.logit_bias.items():
            if not 0 <= token < vocab_size:
                raise InvalidRequest(
                    "logit_bias", f"logit_bias: token id {token} is outside the vocabulary (0..{vocab_size - 1})"
                )
            if not math.isfinite(bias):
                raise InvalidRequest("logit_bias", f"logit_bias of token {token} must be a finite number, got {bias}")
        for field, tokens in (
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids),
            ("bad_token_ids", (token for some in self.bad_token_ids for token in some)),
        ):
            for token in tokens:
                if not 0 <= token < vocab_size:
                    raise InvalidRequest(
                        field, f"{field}: token id {token} is outside the vocabulary (0..{vocab_size - 1})"
                    )
        need(all(self.bad_words), "bad_words", "made of non-empty strings")
        need(all(self.bad_token_ids), "bad_token_ids", "made of non-empty sequences")
        for field, most in (("bad_words", self.MAX_BAD_WORDS), ("bad_token_ids", self.MAX_BAD_SEQUENCES)):
            count = len(getattr(self, field))
            if count > most:
                raise InvalidRequest(field, f"{field}: at most {most} may be given, got {count}")
        for field in ("logprobs", "prompt_logprobs"):
            count = getattr(self, field)
            need(count is None or 0 <= count <= self.MAX_LOGPROBS, field, f"between 0 and {self.MAX_LOGPROBS}")
        never = {some[0] for some in self.bad_token_ids if len(some) == 1}
        if self.allowed_token_ids and never.issuperset(self.allowed_token_ids):
            raise InvalidRequest(
                "allowed_token_ids",
                "allowed_token_ids: bad_words (or bad_token_ids) ban each of them; allow another or ban less",
            )

    @property
    def greedy(self) -> bool:
        """True if the likeliest token is always taken. Temperatures under 1e-5 count as 0: no overflow to NaN."""
        return self.temperature < 1e-5

    @property
    def ends(self) -> frozenset[int]:
        """Token ids that end the output (once `min_tokens` is reached)."""
        return frozenset(self.stop_token_ids if self.ignore_eos else self.stop_token_ids + self.eos_token_ids)


class Status(enum.StrEnum):
    """Where a request is. Only WAITING, PREEMPTED and RUNNING are visible to policies."""

    HIDDEN = "hidden"  # known, not schedulable yet: waiting to fork off, preparing a grammar, paused
    WAITING = "waiting"  # never ran
    PREEMPTED = "preempted"  # ran; its blocks were taken; waits to resume
    RUNNING = "running"
    FINISHED = "finished"


class Mode(enum.StrEnum):
    """What becomes of a preempted request's KV blocks."""

    SWAP = "swap"  # copied to the host tier, copied back on resume
    RECOMPUTE = "recompute"  # dropped, computed again on resume


class Request:
    """One sequence being generated. Owned by the core; plugins write only `state` and, in `arrived`, `level`.

    Times are seconds on the executor's clock. `prompt` and `output` are token ids.
    """

    __slots__ = (
        "_ends",
        "_limit",
        "adapter",
        "admitted_at",
        "arrival",
        "cache_salt",
        "cached_tokens",
        "children",
        "computed",
        "drafts",
        "extra",
        "failures",
        "finish_reason",
        "finished_at",
        "first_token_at",
        "id",
        "level",
        "num_tokens",
        "order",
        "output",
        "params",
        "parent",
        "preemptions",
        "priority",
        "prompt",
        "prompt_logprobs",
        "reached",
        "seed",
        "state",
        "status",
        "stop_reason",
        "tenant",
        "trace",
    )

    def __init__(
        self,
        id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        arrival: float = 0.0,
        order: int = 0,
        priority: int = 0,
        tenant: str = "",
        adapter: str | None = None,
        cache_salt: bytes = b"",
        parent: str | None = None,
        extra: Mapping[str, Json] | None = None,
        trace: str | None = None,
        seed: int = 0,
        limit: int = 2**31,
    ) -> None:
        self.id = id
        self.parent = parent
        self.prompt = prompt
        self.output: list[int] = []
        self.params = params
        self.priority = priority
        self.level: float = priority  # fixed for life once `arrived` has been called
        self.arrival = arrival
        self.order = order  # the n-th request the engine accepted: breaks ties
        self.tenant = tenant
        self.adapter = adapter
        self.cache_salt = cache_salt
        self.extra: Mapping[str, Json] = extra or {}
        self.seed = seed  # unsigned 64 bits: the client's, or the one recorded on arrival
        self.trace = trace  # W3C traceparent of the request's span
        self.state: dict[str, Any] = {}
        self.status = Status.WAITING
        self.num_tokens = len(prompt)  # prompt and output; with a step in flight, and what it will bring
        self.computed = 0  # leading tokens whose keys and values are in the cache, or will be after the steps in flight
        self.reached = 0  # the most tokens that ever were: what is computed below it is computed again
        self.cached_tokens = 0  # of the prompt, found in the cache when the request first started
        # Those of its first tokens so far, until they are told; None: they were told, or are not asked for.
        self.prompt_logprobs: list[Logprobs | None] | None = None if params.prompt_logprobs is None else [None]
        self.children: list[Request] = []  # for n > 1: hidden, until they fork off when this one's prompt is computed
        self.drafts = 0
        self.preemptions = 0
        self.failures = 0
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.finished_at: float | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._ends = params.ends
        self._limit = limit  # the longest this request may become, prompt and output

    @property
    def limit(self) -> int:
        """The most tokens this request may come to have, prompt and output."""
        return self._limit

    @property
    def remaining(self) -> int:
        """Known tokens not computed yet: 1 while decoding."""
        return self.num_tokens + self.drafts - self.computed

    @property
    def scored(self) -> int:
        """Leading prompt tokens whose log-probabilities are known or not asked for."""
        return len(self.prompt if self.prompt_logprobs is None else self.prompt_logprobs)

    @property
    def scoring(self) -> bool:
        """Whether log-probabilities of its prompt are still to come. They come of computing it: then a KV cache takes
        nothing over for the request that others computed."""
        return self.scored < len(self.prompt)

    @property
    def seats(self) -> int:
        """How many of `--max-num-seqs` it takes: one for itself and one for each that will fork off."""
        return 1 + len(self.children)

    def append(self, token: int) -> bool:
        """One more token of output. The core's; True if it was the last: then `finish_reason` is set."""
        self.output.append(token)
        self.num_tokens += 1
        if token in self._ends and len(self.output) > self.params.min_tokens:
            self.finish_reason = "stop"
            self.stop_reason = token if token in self.params.stop_token_ids else None
        elif len(self.prompt) + len(self.output) >= self._limit:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def extend(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """`append` each, up to the last that there may be. Returns those that were appended."""
        for count, token in enumerate(tokens, 1):
            if self.append(token):
                return tokens[:count]
        return tokens

    def __repr__(self) -> str:
        return f"<Request {self.id} {self.status} {self.computed}/{self.num_tokens}>"


class View(Protocol):
    """What a policy may read. Live and read-only; valid only during the call it was passed to."""

    @property
    def now(self) -> float:
        """Seconds on the executor's clock."""

    @property
    def step(self) -> int:
        """Number of the step being planned."""

    @property
    def rng(self) -> Random:
        """Seeded by the step: a policy that draws from it is replayed exactly."""

    @property
    def running(self) -> Sequence[Request]:
        """In admission order."""

    @property
    def waiting(self) -> Sequence[Request]:
        """Preempted requests first, then by arrival."""

    @property
    def total(self) -> int:
        """Unfinished requests, hidden ones too (for queue limits)."""

    @property
    def usage(self) -> Usage:
        """What the KV blocks are doing, as of now in this step: blocks granted to requests before are counted."""

    def queue(self, key: Callable[[Request], Any]) -> Iterator[Request]:
        """Waiting requests by (key, preempted first, arrival), an order that the core keeps incrementally.

        `key` must depend only on what does not change while a request waits; it is called once per
        request and kept by the identity of its code, so write it as a lambda, function or method.
        """

    def queues(self, key: Callable[[Request], Any]) -> Mapping[Any, Iterable[Request]]:
        """Waiting requests in a queue of their own for each value of `key` that any of them has; each queue lists
        preempted requests first, then by arrival. Kept incrementally, so that a policy that is fair to many tenants
        need not look at all who wait. `key` is bound as that of `queue` is; its values must be hashable.
        """

    def ranked(self, key: Callable[[Request], Any]) -> Iterator[Request]:
        """Running and waiting requests in one order. Calling it names every running request."""

    def cached(self, request: Request) -> int:
        """Tokens reusable from the prefix cache beyond `request.computed`."""

    def missing(self, request: Request, tokens: int) -> int:
        """Blocks short for computing `tokens` more; 0 means that it fits now."""


class Budget(NamedTuple):
    """What is left for this step: tokens to compute, and seats (`--max-num-seqs`) for more requests."""

    tokens: int
    requests: int


class Want(msgspec.Struct, frozen=True):  # made for every running request in every step: a third of a tuple's cost
    """Rank `request` here and compute up to `tokens` of it. None: all that remain, or of a running prompt, so many that
    others behind it need not wait for its end (see `framework.policy.leave_room`); 0: hold it this step."""

    request: Request
    tokens: int | None = None


class Shortage(NamedTuple):
    """What the beneficiary lacks."""

    blocks: int
    requests: int


class Victim(NamedTuple):
    """Preempt `request`. Mode None lets the core choose by cost."""

    request: Request
    mode: Mode | None = None


class Reject(NamedTuple):
    """Refuse a request on arrival. `retry_after` is in seconds; `status` is the HTTP status."""

    reason: str
    retry_after: float | None = None
    status: int = 429


class Provider(NamedTuple):
    """One selectable implementation: `--<kind> <name>`.

    `factory` takes by name what it wants of what its kind is given, `options` (an instance of the `options` model)
    and `settings` mostly: docs/plugins.md has the table. `options` is a pydantic model or None. `summary` is one line
    for `framework plugins`. `api` is the contract's major number. `uses` names the request fields that the plugin goes
    by, where ignoring them would mislead a client: "priority" without a scheduler (or augmenting plugin) that uses it
    is refused.
    """

    kind: str
    name: str
    factory: Callable[..., Any]
    options: type | None = None
    api: int = 1
    summary: str = ""
    uses: tuple[str, ...] = ()
