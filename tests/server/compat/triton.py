"""Requests as `tritonclient` makes them, and what it reads from responses."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import tritonclient.grpc.aio as triton

GREEDY = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}


def tensor(name: str, datatype: str, *elements: Any) -> Any:
    """One input with these elements."""
    found = triton.InferInput(name, [len(elements)], datatype)
    kind = {"BYTES": np.object_, "BOOL": np.bool_, "INT32": np.int32, "INT64": np.int64}[datatype]
    found.set_data_from_numpy(np.array(elements, kind))
    return found


def inputs(text: str = "hello", **flags: bool) -> list[Any]:
    """A prompt, and inputs that are true or false."""
    return [
        tensor("text_input", "BYTES", text.encode()),
        *(tensor(name, "BOOL", is_on) for name, is_on in flags.items()),
    ]


def asked(text: str = "hello", request_id: str = "", outputs: Iterable[str] = (), **parameters: Any) -> dict[str, Any]:
    """A request of `stream_infer`, which is streamed; greedy unless told otherwise."""
    return {
        "model_name": "fake",
        "inputs": inputs(text, stream=True),
        "request_id": request_id,
        "outputs": [triton.InferRequestedOutput(name) for name in outputs] or None,
        "parameters": {**GREEDY, **parameters},
    }


@asynccontextmanager
async def client_of(harness: Any) -> AsyncIterator[Any]:
    """A client of a server."""
    async with triton.InferenceServerClient(harness.target) as client:
        yield client


async def each(*requests: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Requests, one after the other, and then the end of them."""
    for request in requests:
        yield request


def strings(result: Any, name: str) -> list[str]:
    """The elements of an output of texts."""
    return [one.decode() for one in result.as_numpy(name)]


def is_final(result: Any) -> bool:
    return result.get_response().parameters["triton_final_response"].bool_param
