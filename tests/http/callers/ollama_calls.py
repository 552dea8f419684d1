"""Calls of Ollama's package, in its environment: `python ollama_calls.py NAME URL` prints a JSON value.

chats      what the clients get for one conversation: synchronous and asynchronous, whole and streamed
prompts    texts of prompts, raw and not, with a schema, and log-probabilities
vectors    embeddings of both calls
models     what lists and descriptions of models have
errors     the classes and statuses of errors
"""

import asyncio
import json
import sys
from typing import Any

import ollama

USER = {"role": "user", "content": "Weather?"}
OPTIONS = {"temperature": 0, "num_predict": 200, "num_ctx": 2048, "seed": 3}


def weather(city: str) -> str:
    """Return the weather.

    Args:
        city: where
    """
    return city


def summarized(parts: list[Any]) -> Any:
    """Return the text, the thought, the calls and the counts of an answer."""
    calls = [call.function.model_dump() for one in parts for call in one.message.tool_calls or ()]
    last = parts[-1]
    text = "".join(one.message.content or "" for one in parts)
    thought = "".join(one.message.thinking or "" for one in parts)
    assert last.done and last.total_duration >= last.eval_duration >= 0
    return [text, thought, calls, last.done_reason, last.prompt_eval_count, last.eval_count]


def chats(url: str) -> Any:
    how: dict[str, Any] = {"model": "fake", "messages": [USER], "tools": [weather], "options": OPTIONS, "think": True}
    client = ollama.Client(url)
    found = [summarized([client.chat(**how)]), summarized(list(client.chat(**how, stream=True)))]
    answer = client.chat(**how)
    turns = [USER, answer.message, {"role": "tool", "tool_name": "weather", "content": "sun"}]
    again = client.chat(**{**how, "messages": turns, "keep_alive": "5m"})

    async def asynchronous() -> None:
        remote = ollama.AsyncClient(url)
        found.append(summarized([await remote.chat(**how)]))
        found.append(summarized([one async for one in await remote.chat(**how, stream=True)]))

    asyncio.run(asynchronous())
    return [found, again.prompt_eval_count > answer.prompt_eval_count]


def prompts(url: str) -> Any:
    client = ollama.Client(url)
    how: dict[str, Any] = {"model": "fake:latest", "prompt": "ab", "options": {"temperature": 0, "num_predict": 4}}
    raw = client.generate(**how, raw=True, logprobs=True, top_logprobs=2)
    streamed = "".join(one.response for one in client.generate(**how, raw=True, stream=True))
    chat = client.generate(**how, system="Be brief.")
    loaded = client.generate("fake")
    return [
        [
            raw.response == streamed,
            raw.eval_count,
            raw.done_reason,
            len(raw.logprobs),
            len(raw.logprobs[0].top_logprobs),
        ],
        [chat.eval_count, loaded.done_reason],
    ]


def vectors(url: str) -> Any:
    client = ollama.Client(url)
    many = client.embed("fake", ["one", "three"])
    return [[len(one) for one in many.embeddings], len(client.embeddings("fake", "one").embedding)]


def models(url: str) -> Any:
    client = ollama.Client(url)
    (listed,), (loaded,), shown = client.list().models, client.ps().models, client.show("fake")
    return [
        listed.model,
        listed.digest == loaded.digest,
        loaded.context_length,
        shown.capabilities,
        len(shown.modelinfo),
        client.pull("fake").status,
    ]


def errors(url: str) -> Any:
    client = ollama.Client(url)
    calls = (
        lambda: client.chat("other", [USER]),
        lambda: list(client.chat("other", [USER], stream=True)),
        lambda: client.chat("fake", [{**USER, "images": [b"x"]}]),
        lambda: client.chat("fake", [USER], options={"mirostat": 2}),
        lambda: client.pull("other"),
    )
    found = []
    for call in calls:
        try:
            call()
        except ollama.ResponseError as error:
            found.append([error.status_code, error.error])
    return found


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](sys.argv[2])))
