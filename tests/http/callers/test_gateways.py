"""Routers that others wrote, unmodified, in front of two servers of the demo model (`make callers` runs them alone)."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from jpaged.demo import FOLDER
from tests.http.callers.conftest import DemoServer, free_port
from tests.http.callers.test_callers import BIN, ENVIRONMENT
from tests.processes import WAIT_S

DYNAMO = Path(sys.prefix) / "callers-dynamo" / "bin" / "python"
DYNAMO_WORKER = Path(__file__).parents[3] / "deploy" / "dynamo" / "worker.py"
BLOCK_SIZE = 16
MESSAGES = [{"role": "user", "content": "Tell me a story about a cat."}]
TIMES = {
    "type": "object",
    "properties": {"times": {"enum": [1, 2]}},
    "required": ["times"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "play", "parameters": TIMES}}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 12, "temperature": 0},
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0},
    "/v1/embeddings": {"input": ["a cat", "a dog"]},
    "/v1/responses": {"input": "Tell me a story.", "max_output_tokens": 12, "temperature": 0},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 12, "temperature": 0},
}
ROUTERS = {
    "vllm, by prefix": ["vllm-router", "--policy", "cache_aware"],
    "vllm, by KV events": ["vllm-router", "--policy", "kv_aware", "--kv-event-block-size", str(BLOCK_SIZE)],
    "sglang, by prefix": ["sglang-router", "launch", "--policy", "cache_aware"],
}
NOT_ROUTED = {("sglang-router", "/v1/messages")}
"""Paths that a router does not have."""


@pytest.fixture(scope="module")
def servers(demo: DemoServer, second_demo: DemoServer) -> list[DemoServer]:
    return [demo, second_demo]


@pytest.fixture(scope="module", params=ROUTERS)
def router(
    request: pytest.FixtureRequest, servers: list[DemoServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """A router's name and its address, once it has both servers."""
    name, log_file = request.param, tmp_path_factory.mktemp("router") / "log"
    port = free_port()
    words = [*ROUTERS[name], "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    words += ["--worker-urls", *(one.url for one in servers)]
    if "kv_aware" in words:
        words += ["--kv-event-model", "demo"]
        words += [word for one in servers for word in ("--kv-event-source", f"{one.url}={one.kv_events}")]
    with log_file.open("w") as log:
        process = subprocess.Popen([str(BIN / words[0]), *words[1:]], env=ENVIRONMENT, stdout=log, stderr=log)
    try:
        url, deadline_s = f"http://127.0.0.1:{port}", time.monotonic() + WAIT_S
        while True:
            with contextlib.suppress(httpx2.TransportError):
                if httpx2.get(f"{url}/readiness").status_code == 200:
                    break
            assert process.poll() is None and time.monotonic() < deadline_s, log_file.read_text()[-3000:]
            time.sleep(0.1)
        yield name, url
    finally:
        process.kill()
        process.wait()


def text_of(answer: Any) -> Any:
    """What an answer says, without its ids and times."""
    if "data" in answer:
        return [item["embedding"] for item in answer["data"]]
    return [answer.get(key) for key in ("choices", "content")] + [
        part["text"] for item in answer.get("output", []) for part in item["content"]
    ]


def streamed_text(url: str, body: dict[str, Any]) -> str:
    with httpx2.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=WAIT_S) as response:
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


@pytest.mark.long
def test_a_router_of_others_answers_as_a_server_does(router, servers):
    name, url = router
    for path, fields in REQUESTS.items():
        if (ROUTERS[name][0], path) in NOT_ROUTED:
            continue
        body = {"model": "demo", **fields}
        answers = [httpx2.post(f"{base}{path}", json=body, timeout=WAIT_S) for base in (servers[0].url, url)]
        assert [answer.status_code for answer in answers] == [200, 200], path
        assert text_of(answers[0].json()) == text_of(answers[1].json()) != [], path
    chat = {"model": "demo", **REQUESTS["/v1/chat/completions"]}
    whole = httpx2.post(f"{url}/v1/chat/completions", json=chat, timeout=WAIT_S).json()
    assert streamed_text(url, {**chat, "stream": True}) == whole["choices"][0]["message"]["content"] != ""
    forced = {**chat, "tools": [TOOL], "tool_choice": "required", "max_tokens": 100}
    message = httpx2.post(f"{url}/v1/chat/completions", json=forced, timeout=WAIT_S).json()["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["name"] == "play"
    wrong = httpx2.post(f"{url}/v1/chat/completions", json={**chat, "temperature": -1}, timeout=WAIT_S)
    assert wrong.status_code == 400 and "temperature" in wrong.text


@pytest.mark.long
def test_turns_of_a_conversation_find_their_prefix(router):
    name, url = router
    for session in range(4):
        messages: list[dict[str, str]] = []
        before = 0
        for turn in range(3):
            messages += [{"role": "user", "content": f"{name} {session} {turn}. " + "The cat went to the park. " * 12}]
            body = {"model": "demo", "messages": messages, "max_tokens": 12, "temperature": 0}
            answer = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=WAIT_S).json()
            usage = answer["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert cached >= before - 2 * BLOCK_SIZE, (session, turn)
            before = usage["prompt_tokens"]
            messages += [{"role": "assistant", "content": answer["choices"][0]["message"]["content"]}]


@pytest.mark.deep
def test_dynamo_follows_the_caches_by_their_events(servers):
    workers = json.dumps([one._asdict() for one in servers])
    words = [str(DYNAMO), str(Path(__file__).with_name("dynamo") / "dynamo_calls.py"), workers, str(BLOCK_SIZE)]
    environment = {**ENVIRONMENT, "DYN_LOG": "error", "NO_PROXY": "*", "PYTHONPATH": ""}
    done = subprocess.run(words, env=environment, capture_output=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    # A prompt of four blocks is on one server; half of it is the beginning of another prompt.
    assert found["overlaps"] == [[4, 0], [0, 4]] and found["selected"] == [1, 2]
    assert found["half"] == [2, 0] and found["unknown"] == [0, 0]
    assert found["replayed"] == [4, 0]  # by a reader that starts after the events
    assert found["removed"] == [0, 4]


@contextlib.contextmanager
def dynamo(servers: list[DemoServer], folder: Path, *, by_events: bool) -> Iterator[str]:
    """Yield the address of Dynamo's frontend with a worker for each server."""
    port, store = free_port(), folder / "discovery"
    environment = {**ENVIRONMENT, "DYN_LOG": "error", "DYN_FILE_KV": str(store), "NO_PROXY": "*", "PYTHONPATH": ""}
    words = ["-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
    words += ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
    words += ["--router-mode", "kv" if by_events else "round-robin", "--kv-cache-block-size", str(BLOCK_SIZE)]
    commands = [[*words, "--enable-anthropic-api"]]
    for one in servers:
        more = ["--tokenizer", str(FOLDER), "--kv-events", one.kv_events, "--block-size", str(BLOCK_SIZE)]
        commands.append([str(DYNAMO_WORKER), one.url, "demo", *(more if by_events else [])])
    with contextlib.ExitStack() as opened:
        log = opened.enter_context((folder / "log").open("w"))
        processes = []
        for command in commands:
            process = subprocess.Popen([str(DYNAMO), *command], env=environment, stdout=log, stderr=log)
            processes.append(process)
            opened.callback(process.wait)
            opened.callback(process.kill)
        url, deadline_s = f"http://127.0.0.1:{port}", time.monotonic() + WAIT_S
        while True:
            with contextlib.suppress(httpx2.TransportError):
                found = httpx2.get(f"{url}/health").json()
                if len([one for one in found["instances"] if one["endpoint"] == "generate"]) == len(servers):
                    break
            are_alive = all(process.poll() is None for process in processes)
            assert are_alive and time.monotonic() < deadline_s, (folder / "log").read_text()[-3000:]
            time.sleep(0.1)
        yield url


@pytest.mark.deep
@pytest.mark.parametrize("by_events", [False, True])
def test_dynamos_frontend_answers_as_a_server_does(servers, tmp_path, by_events):
    with dynamo(servers, tmp_path, by_events=by_events) as url:
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"):
            body = {"model": "demo", **REQUESTS[path]}
            answers = [httpx2.post(f"{base}{path}", json=body, timeout=WAIT_S) for base in (servers[0].url, url)]
            assert [answer.status_code for answer in answers] == [200, 200], path
            assert said(answers[0].json()) == said(answers[1].json()) != "", path
        chat = {"model": "demo", **REQUESTS["/v1/chat/completions"]}
        whole = httpx2.post(f"{url}/v1/chat/completions", json=chat, timeout=WAIT_S).json()
        assert streamed_text(url, {**chat, "stream": True}) == said(whole)
        long = httpx2.post(f"{url}/v1/chat/completions", json={**chat, "max_tokens": 10**6}, timeout=WAIT_S)
        assert long.status_code == 400 and "over max_model_len" in long.text


@pytest.mark.deep
def test_dynamos_router_follows_the_caches(servers, tmp_path):
    def hits(one: DemoServer) -> float:
        text = httpx2.get(f"{one.url}/metrics").text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("vllm:prefix_cache_hits"))

    with dynamo(servers, tmp_path, by_events=True) as url:
        for number, one in [*enumerate(servers)] * 2:
            words = f"Session {number} of {tmp_path.name}. " + "The dog ran to the river. " * 20
            body = {"model": "demo", "messages": [{"role": "user", "content": words}], "max_tokens": 4}
            first = httpx2.post(f"{one.url}/v1/chat/completions", json=body, timeout=WAIT_S).json()
            num_tokens, deadline_s = first["usage"]["prompt_tokens"], time.monotonic() + WAIT_S
            before = hits(one)
            while hits(one) < before + num_tokens - 2 * BLOCK_SIZE:  # its events may come after the answer
                before = hits(one)
                assert time.monotonic() < deadline_s
                httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=WAIT_S).raise_for_status()


def said(answer: Any) -> str:
    """Return the text of an answer to a chat, a completion, a response or a message."""
    if "choices" in answer:
        (choice,) = answer["choices"]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])
    parts = [*answer.get("content", []), *(part for item in answer.get("output", []) for part in item["content"])]
    return "".join(part["text"] for part in parts)
