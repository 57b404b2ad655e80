"""An engine process without a model: it speaks the real protocol and generates the tokens that the prompt holds.

The prompt dictates the output, so that a test can place every stop string, character and end exactly. `Add.extra`
steers it: `chunk` tokens per message (default 1); `hold`: answer nothing until aborted; `error` and `status`: refuse
({id} in it is the request's); `retry_after`: of a refusal; `junk`: send what is no message; `spin`, `sleep`: compute or
do nothing for so many seconds first;
`scores`: the log-probability of the tokens of each of `n` sequences;
`die`: end the process after so many tokens; `fatal`: say why first; `pace`: seconds per step. Its statistics count
unfinished requests as `running`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from typing import Any

import msgspec
import zmq

from framework.messages import (
    Abort,
    Add,
    EngineInfo,
    EngineStats,
    Fatal,
    Outputs,
    Progress,
    Ready,
    ToEngine,
    TokenOutput,
)
from framework.plan import Logprobs
from framework.registry import load_plugins
from framework.settings import Settings


class EchoProcess:
    """As `framework.process.EngineProcess`."""

    def __init__(self, settings: Settings) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.address = f"ipc://{self.folder.name}/engine"
        command = [sys.executable, __file__, self.address, *(settings.served_model_name or ("echo",))[:1]]
        self.process = subprocess.Popen(command)

    def end(self, patience: float = 2.0) -> None:
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()


def info(model: str) -> EngineInfo:
    return EngineInfo(
        model=model,
        architecture="Echo",
        dtype="none",
        device="none",
        vocab_size=512,
        max_model_len=256,
        max_model_len_reason="set",
        block_size=16,
        kv_blocks=64,
        block_bytes=1,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        threads=1,
        providers={},
        manifest=load_plugins().manifest,
    )


def logprobs(token: int, count: int, value: float = -0.5) -> Logprobs:
    top = tuple((id, -1.0 - id) for id in range(count))
    return Logprobs(token, float("-inf") if token == 0 else value, 1, top)


def main(address: str, model: str) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.connect(address)
    decoder = msgspec.msgpack.Decoder(ToEngine)
    requests: dict[str, tuple[Add, int]] = {}
    generated = step = 0

    def send(message: Any) -> None:
        socket.send(msgspec.msgpack.encode(message))

    send(Progress("load weights", 1.0))
    send(Ready(info(model)))
    while True:
        outputs: list[TokenOutput] = []
        busy = any(not add.extra.get("hold") for add, _ in requests.values())
        while socket.poll(0 if busy else None):
            match decoder.decode(socket.recv()):
                case Add() as add if "error" in add.extra:
                    error, status = add.extra["error"].format(id=add.id), add.extra.get("status", 500)
                    output = TokenOutput(add.id, 0, [], finish_reason="error", error=error, status=status)
                    output.retry_after = add.extra.get("retry_after", 1.5)
                    outputs.append(output)
                case Add(extra={"junk": str(junk)}):
                    socket.send(junk.encode())
                case Add() as add:
                    time.sleep(add.extra.get("sleep", 0))
                    until = time.monotonic() + add.extra.get("spin", 0)
                    while time.monotonic() < until:
                        pass
                    for each in add.ids:
                        assert each not in requests
                        requests[each] = (add, 0)
                case Abort(ids=ids, reason=reason):
                    for id in ids:
                        if id in requests:
                            outputs.append(TokenOutput(id, requests.pop(id)[1], [], finish_reason=reason))
            busy = True
        for id, (add, done) in list(requests.items()):
            if add.extra.get("hold"):
                continue
            if "die" in add.extra and done >= add.extra["die"]:
                if "fatal" in add.extra:
                    send(Fatal(add.extra["fatal"], traceback="there"))
                context.destroy(linger=1000)
                sys.exit(3)
            tokens = add.prompt[done : done + add.extra.get("chunk", 1)]
            if add.params.max_tokens is not None:
                tokens = tokens[: add.params.max_tokens - done]
            ended = next((i for i, token in enumerate(tokens) if token in add.params.ends), None)
            finish = None
            if ended is not None:
                tokens, finish = tokens[: ended + 1], "stop"
            elif done + len(tokens) in (len(add.prompt), add.params.max_tokens):
                finish = "length"
            output = TokenOutput(id, done, tokens, finish_reason=finish)
            if add.params.logprobs is not None:
                value = add.extra["scores"][add.ids.index(id)] if "scores" in add.extra else -0.5
                output.logprobs = [logprobs(token, add.params.logprobs, value) for token in tokens]
            if add.params.prompt_logprobs is not None and done == 0:
                scored = [logprobs(token, add.params.prompt_logprobs) for token in add.prompt[1:]]
                output.prompt_logprobs = [None, *scored]
            outputs.append(output)
            generated += len(tokens)
            requests[id] = (add, done + len(tokens))
            if finish is not None:
                del requests[id]
        step += 1
        time.sleep(max((add.extra.get("pace", 0) for add, _ in requests.values()), default=0))
        stats = EngineStats(step, len(requests), 0, kv_blocks=64, kv_holding=len(requests), generation_tokens=generated)
        send(Outputs(outputs, stats, 0))


if __name__ == "__main__":
    main(*sys.argv[1:])
