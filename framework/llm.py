"""The Python API: the engine in this process, for notebooks, scripts and tests.

from framework import LLM, SamplingParams

llm = LLM("path/to/checkpoint")
for output in llm.generate(["Once upon a time", "The answer is"], SamplingParams(max_tokens=32)):
    print(output.text)
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import msgspec
from msgspec.structs import asdict

from . import machine
from .checkpoint import open_checkpoint
from .detokenizer import Assembler
from .errors import ConfigError, FrameworkError, InvalidRequest, Rejected
from .inputs import InputProcessor, Routing
from .messages import Add, RequestTimes, TokenOutput
from .plan import Logprobs
from .registry import load_plugins
from .settings import Settings
from .startup import Progress, build_engine
from .types import SamplingParams

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
IDLE_SECONDS = 0.01
"""How soon a policy that let nothing run is asked again."""
Params = SamplingParams | Mapping[str, Any] | None


class RequestOutput(msgspec.Struct):
    """What came of one prompt. Filled in as tokens arrive; complete once `finish_reason` is set."""

    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[Logprobs] = []
    """One for each token if `SamplingParams.logprobs` was set, else empty."""
    prompt_logprobs: list[Logprobs | None] = []
    """One for each prompt token if `SamplingParams.prompt_logprobs` was set, else empty. None for the first. One list
    for all outputs of a prompt."""
    finish_reason: str | None = None
    """stop, length, abort."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None for EOS."""
    times: RequestTimes | None = None


class LLM:
    """A model, ready to generate. Not thread-safe. Use as a context manager or call `close`.

    Keyword arguments are those of the command line (`framework serve --help`), with underscores:
    `LLM("model", scheduler="priority", kv_blocks=512)`. FRAMEWORK_* variables apply as they do there.
    Raises `ConfigError`, `ModelError` or `PluginError`, each saying what to change.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        settings: Settings | None = None,
        plugins: Iterable[tuple[str, object]] = (),
        progress: Progress = lambda stage, share: None,
        **flags: Any,
    ) -> None:
        if model is not None:
            flags["model"] = str(model)
        if settings is not None and flags:
            raise ConfigError(f"give either settings or {', '.join(flags)}, not both")
        machine.prepare_environment()
        self.settings = settings or Settings.load(None, **flags)
        loaded = load_plugins(plugins)
        loaded.activate(self.settings, engine=True)
        self.checkpoint = checkpoint = open_checkpoint(self.settings, loaded)
        self.tokenizer = checkpoint.tokenizer()
        self.engine, self.info = build_engine(self.settings, loaded, checkpoint, progress)
        self.inputs = InputProcessor(checkpoint, self.tokenizer, self.info)
        self._ids = itertools.count(1)
        self._mail: dict[str, list[TokenOutput]] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] = None,
        *,
        n: int = 1,
        priority: int | Sequence[int] = 0,
        tenant: str | Sequence[str] = "",
        cache_salt: str | Sequence[str] = "",
    ) -> list[RequestOutput]:
        """Complete each prompt (text or token ids) `n` times, all in one batch; outputs in the order of the prompts,
        those of one prompt side by side.

        `params`: one for all, or one for each. Fields that are not set have the checkpoint's defaults if a mapping
        is given, and those of `SamplingParams` if such an object is. `priority` (lower is sooner), `tenant` and
        `cache_salt` (only equal salts share cached prefixes): one for all, or a list with one for each. Raises
        `InvalidRequest` for bad values, a priority that the scheduler would ignore included.
        """
        batch = [prompts] if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)) else prompts
        routing = self._routing(len(batch), priority, tenant, cache_salt)
        return self._run([self.inputs.encode(prompt) for prompt in batch], params, routing, n)  # type: ignore[arg-type]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params | Sequence[Params] = None,
        *,
        n: int = 1,
        priority: int | Sequence[int] = 0,
        tenant: str | Sequence[str] = "",
        cache_salt: str | Sequence[str] = "",
    ) -> list[RequestOutput]:
        """Answer each conversation `n` times through the checkpoint's chat template. Arguments as those of
        `generate`."""
        batch = [messages] if messages and isinstance(messages[0], Mapping) else messages
        routing = self._routing(len(batch), priority, tenant, cache_salt)
        prompts = [self.inputs.render(conversation) for conversation in batch]  # type: ignore[arg-type]
        return self._run(prompts, params, routing, n)

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: Params = None,
        *,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
    ) -> Iterator[str]:
        """Text of one completion (or of one answer, if `prompt` is a list of messages) as it comes.

        Leaving the loop early frees the request.
        """
        chat = not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Mapping)
        ids = self.inputs.render(prompt) if chat else self.inputs.encode(prompt)  # type: ignore[arg-type]
        routing = [self.inputs.routing(priority, tenant, cache_salt)]
        for _, text in self._stream([ids], [params], routing):
            yield text

    def _routing(self, count: int, *values: Any) -> list[Routing]:
        each = [list(v) if isinstance(v, (list, tuple)) else [v] * count for v in values]
        for field, some in zip(("priority", "tenant", "cache_salt"), each, strict=True):
            if len(some) != count:
                raise InvalidRequest(field, f"{field}: {len(some)} given for {count} prompts; give one, or one each")
        return [self.inputs.routing(*one) for one in zip(*each, strict=True)]

    def _run(
        self, prompts: Sequence[list[int]], params: Params | Sequence[Params], routing: Sequence[Routing], n: int
    ) -> list[RequestOutput]:
        each: list[Params] = list(params) if isinstance(params, (list, tuple)) else [params] * len(prompts)  # type: ignore[list-item]
        if len(each) != len(prompts):
            raise InvalidRequest(
                "params", f"params: {len(each)} given for {len(prompts)} prompts; give one, or one each"
            )
        if not isinstance(n, int) or n < 1:
            raise InvalidRequest("n", f"n must be at least 1, got {n!r}")
        outputs = [RequestOutput(prompt) for prompt in prompts for _ in range(n)]
        for _ in self._stream(prompts, each, routing, outputs, n):
            pass
        return outputs

    def _stream(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[Params],
        routing: Sequence[Routing],
        outputs: list[RequestOutput] | None = None,
        n: int = 1,
    ) -> Iterator[tuple[int, str]]:
        """(index of the output, new text) as it comes; `outputs` are filled in."""
        outputs = outputs or [RequestOutput(prompt) for prompt in prompts]
        index: dict[str, int] = {}
        assemblers: list[Assembler] = []
        adds: list[Add] = []
        for prompt, given, routed in zip(prompts, params, routing, strict=True):
            if isinstance(given, SamplingParams):
                chosen = self.inputs.typed(asdict(given))
            else:
                chosen = self.inputs.params(given or {})
            complete = self.inputs.complete(chosen, prompt)
            adds.append(Add(f"llm-{next(self._ids)}", prompt, complete, 0, **routed._asdict(), n=n))
            for id in adds[-1].ids:
                index[id] = len(assemblers)
                assemblers.append(Assembler(self.tokenizer, complete, prompt))
        try:
            for add in adds:
                self._mail.update((id, []) for id in add.ids)
                self._mail[add.id] = self.engine.add(add)
            while index:
                for output in self._receive(index):
                    if output.id not in index:
                        continue  # ended by a stop string in this very round
                    i = index[output.id]
                    if output.prompt_logprobs is not None:  # told once for all of a prompt
                        for one in outputs[i - i % n : i - i % n + n]:
                            one.prompt_logprobs = output.prompt_logprobs
                    text = self._take(output, outputs[i], assemblers[i])
                    if outputs[i].finish_reason is not None:
                        del index[output.id], self._mail[output.id]
                    if text:
                        yield i, text
        finally:
            self.engine.abort(list(index))
            for id in index:
                self._mail.pop(id, None)

    def _receive(self, ids: Iterable[str]) -> list[TokenOutput]:
        """What came for `ids`. Steps the engine until something did; what came for other streams waits for them."""
        while True:
            found = [output for id in ids for output in self._mail[id]]
            if found:
                for id in ids:
                    self._mail[id] = []
                return found
            before, outputs = self.engine.steps, self.engine.step()
            for output in outputs:
                if output.id in self._mail:
                    self._mail[output.id].append(output)
            if not outputs and self.engine.steps == before:
                time.sleep(IDLE_SECONDS)

    def _take(self, output: TokenOutput, into: RequestOutput, assembler: Assembler) -> str:
        if output.error is not None:
            error = output.error
            raise Rejected(error, output.status, output.retry_after) if output.status < 500 else FrameworkError(error)
        delta = assembler.push(output)
        into.text += delta.text
        into.token_ids.extend(delta.tokens)
        into.logprobs.extend(delta.logprobs)
        into.finish_reason, into.stop_reason, into.times = delta.finish_reason, delta.stop_reason, output.times
        if delta.finish_reason is not None and output.finish_reason is None:
            for ended in self.engine.abort([output.id], "stop"):
                into.times = ended.times
        return delta.text

    def close(self) -> None:
        """Free the model and the pool."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
