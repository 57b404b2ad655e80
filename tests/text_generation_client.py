"""Run by `test_clients_text_generation.py` with an interpreter of its own: the `text-generation` package needs an older
huggingface_hub than the rest. Its argument is the URL of a server that answers with its prompt; it prints `ok`."""

import asyncio
import sys
from typing import Any

from text_generation import AsyncClient, Client
from text_generation.errors import OverloadedError, ValidationError

MESSAGES = [{"role": "user", "content": "Hello, fox."}]


def outside(event: str, args: tuple[Any, ...]) -> None:
    """Refuses whatever leaves this machine; nothing here may even try."""
    if event in ("socket.connect", "socket.getaddrinfo"):
        host = args[0] if event == "socket.getaddrinfo" else args[1][0]
        assert host in ("127.0.0.1", b"127.0.0.1"), host


def refused(kind: type[Exception], words: str, call: Any, *args: Any, **fields: Any) -> None:
    try:
        call(*args, **fields)
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"{kind.__name__} did not come")


def text(client: Client) -> None:
    answer = client.generate("one two three", max_new_tokens=50)
    assert answer.generated_text == "one two three"
    assert answer.details.finish_reason == "length" and answer.details.seed is None
    assert answer.details.generated_tokens == len(answer.details.tokens)
    assert "".join(token.text for token in answer.details.tokens) == "one two three"
    assert all(token.logprob < 0 and not token.special for token in answer.details.tokens)
    answer = client.generate("one two three", max_new_tokens=50, stop_sequences=["tw"], return_full_text=True)
    assert answer.generated_text == "one two threeone tw"
    assert answer.details.finish_reason == "stop_sequence"
    answer = client.generate(
        "one two", do_sample=True, seed=3, temperature=0.7, top_k=5, top_p=0.9, repetition_penalty=1.2, truncate=100,
        max_new_tokens=2, decoder_input_details=True, top_n_tokens=2,
    )  # fmt: skip
    assert answer.details.generated_tokens == 2 and answer.details.seed == 3
    assert "".join(token.text for token in answer.details.prefill) == "one two"
    assert [len(tops) for tops in answer.details.top_tokens] == [2, 2]


def streamed(client: Client) -> None:
    events = list(client.generate_stream("one two three", max_new_tokens=50))
    assert "".join(event.token.text for event in events) == "one two three"
    assert [event.generated_text for event in events] == [None] * (len(events) - 1) + ["one two three"]
    assert [event.details for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].details.finish_reason == "length"
    assert events[-1].details.generated_tokens == len(events)
    *_, last = client.generate_stream("one two three", max_new_tokens=50, stop_sequences=["tw"])
    assert last.generated_text == "one tw" and last.details.finish_reason == "stop_sequence"


def chat(client: Client) -> None:
    """Whole only: in streams it insists on tool calls in every piece, which no server sends."""
    answer = client.chat(messages=MESSAGES, max_tokens=50, seed=3, logprobs=True, top_logprobs=2)
    assert answer.choices[0].message.content == "user\nHello, fox."
    assert answer.choices[0].finish_reason == "stop" and answer.usage["completion_tokens"] > 0


def errors(client: Client) -> None:
    refused(ValidationError, "too long", client.generate, "word " * 2000, max_new_tokens=5)
    refused(ValidationError, "max_new_tokens", client.generate, "a", max_new_tokens=100_000)
    refused(ValidationError, "stop", client.generate, "a", stop_sequences=[str(number) for number in range(9)])
    refused(ValidationError, "too long", lambda: list(client.generate_stream("word " * 2000)))


async def asynchronous(client: AsyncClient) -> None:
    answers = await asyncio.gather(*(client.generate(f"word {n}", max_new_tokens=50) for n in range(4)))
    assert [answer.generated_text for answer in answers] == [f"word {n}" for n in range(4)]
    pieces = [event.token.text async for event in client.generate_stream("one two", max_new_tokens=50)]
    assert "".join(pieces) == "one two"
    answer = await client.chat(messages=MESSAGES, max_tokens=50)
    assert answer.choices[0].message.content == "user\nHello, fox."


def overloaded(client: Client) -> None:
    refused(OverloadedError, "queue is full", client.generate, "a", max_new_tokens=5)
    refused(OverloadedError, "queue is full", lambda: list(client.generate_stream("a", max_new_tokens=5)))


if __name__ == "__main__":
    sys.addaudithook(outside)
    url, *which = sys.argv[1:]
    for check in map(globals().get, which):
        made = AsyncClient if check is asynchronous else Client
        result = check(made(url, timeout=30))  # type: ignore[misc]
        if result is not None:
            asyncio.run(result)
    print("ok")
