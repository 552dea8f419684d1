"""The audit of a server: a line for each call on each face, and never what was asked or answered."""

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jpaged._proto.v1 import control_pb2
from jpaged.access.authenticator import CallContext, enter
from jpaged.access.keys import ApiKey, Role
from jpaged.client import AsyncClient
from jpaged.errors import JpagedError
from jpaged.service.calls import Call
from jpaged.types import Prompt, SamplingParams
from tests.access.test_keys import FILE, OTHER, TOKEN
from tests.server.harness import collect, eventually, failure_of, request, running

SECRET = "attack at dawn"


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "keys.toml").write_text(FILE)
    return {"api_keys": str(tmp_path / "keys.toml"), "audit_log": str(tmp_path / "audit.jsonl"), "http_port": 0}


async def test_every_call_is_a_line_and_none_has_a_prompt_an_answer_or_a_token(options):
    path = Path(options["audit_log"])
    async with running(**options) as harness:
        health: Any = health_pb2_grpc.HealthStub(harness.channel)
        await health.Check(health_pb2.HealthCheckRequest())
        await failure_of(harness.inference.Generate(request(SECRET)))
        async with AsyncClient(harness.target, api_key=TOKEN) as client:
            output = await client.complete(SECRET, SamplingParams(max_tokens=4, n=2, temperature=0.0, ignore_eos=True))
            await client.embed([SECRET, SECRET])
            with pytest.raises(JpagedError):
                await client.pin_prefix("system", SECRET)
        async with AsyncClient(harness.target, api_key=OTHER) as client:
            await client.pin_prefix("system", SECRET)
            with pytest.raises(JpagedError):
                await client.load_adapter("one", "/no/such/path")
            with pytest.raises(JpagedError):
                await client.abort("gone")
            with pytest.raises(JpagedError):
                await client.complete(SECRET, SamplingParams(max_tokens=1000))
        async with httpx2.AsyncClient(base_url=harness.http_url) as http:
            await http.get("/health")
            await http.get("/v1/models")
            body = {"model": "fake", "input": SECRET}
            await http.post("/v1/embeddings", json=body, headers={"authorization": f"Bearer {TOKEN}"})
    lines = lines_of(path)
    for secret in (SECRET, output.outputs[0].text, TOKEN, OTHER):
        assert not any(secret in str(line) for line in lines)
    assert [(line["method"].rpartition("/")[2], line["key"], line["status"], line["act"]) for line in lines] == [
        ("Generate", "", "UNAUTHENTICATED", ""),
        ("Generate", "acme-1", "OK", ""),
        ("Embed", "acme-1", "OK", ""),
        ("PinPrefix", "acme-1", "PERMISSION_DENIED", "PinPrefix"),
        ("PinPrefix", "acme-2", "OK", "PinPrefix system"),
        ("LoadAdapter", "acme-2", "UNIMPLEMENTED", "LoadAdapter one"),
        ("Abort", "acme-2", "NOT_FOUND", "Abort gone"),
        ("Generate", "acme-2", "INVALID_ARGUMENT", ""),
        ("models", "", 401, ""),
        ("embeddings", "acme-1", 200, ""),
    ]
    generated, embedded = lines[1:3]
    assert (generated["tenant"], generated["face"], generated["model"]) == ("acme", "grpc", "fake")
    assert (generated["prompt_tokens"], generated["completion_tokens"]) == (len(SECRET), 8)
    assert generated["request_id"] == output.request_id
    assert generated["peer"].startswith("ipv4:127.0.0.1:")
    assert generated["duration_s"] > 0
    assert embedded["prompt_tokens"] == 2 * len(SECRET)
    assert lines[7]["error"] == "REQUEST_TOO_LONG"
    assert (lines[9]["face"], lines[9]["method"]) == ("http", "POST /v1/embeddings")


async def test_a_caller_that_goes_away_is_a_line_with_what_was_generated(options):
    del options["api_keys"]
    path = Path(options["audit_log"])
    async with running(**options) as harness:
        harness.faults.hold_after(3)
        metadata = (("x-jpaged-tenant", "a"),)
        call = harness.inference.Generate(request(request_id="mine", max_tokens=100), metadata=metadata)
        await call.read()
        call.cancel()
        await eventually(lambda: len(path.read_text().splitlines()) == 1)
        harness.faults.release()
    (line,) = lines_of(path)
    assert (line["status"], line["error"], line["request_id"]) == ("CANCELLED", "CANCELLED", "mine")
    assert (line["tenant"], line["prompt_tokens"]) == ("a", 5)
    assert 1 <= line["completion_tokens"] < 100


async def test_an_abort_is_told_with_the_id(options):
    del options["api_keys"]
    async with running(**options) as harness:
        harness.faults.hold_after(3)
        call = harness.inference.Generate(request(request_id="mine", max_tokens=100))
        await call.read()
        await harness.control.Abort(control_pb2.AbortRequest(request_id="mine"))
        harness.faults.release()
        await collect(call)
    by_method = {line["method"].rpartition("/")[2]: line for line in lines_of(Path(options["audit_log"]))}
    assert by_method["Abort"]["act"] == "Abort mine"
    assert by_method["Generate"]["status"] == "OK"


async def test_a_full_disk_keeps_nobody_from_an_answer(options):
    async with running(audit_log="/dev/full") as harness:
        for _ in range(3):
            await collect(harness.inference.Generate(request()))
        audit = harness.server._gate._audit
        assert audit is not None
        await eventually(lambda: audit.num_lost == 3)


async def test_a_request_that_no_open_call_waits_for_is_a_line_of_its_own(options):
    path = Path(options["audit_log"])
    async with running(**options) as harness:
        call = Call(
            read=lambda: (Prompt(text=SECRET), SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)),
            size=len(SECRET),
            request_id="line-1",
            tenant="acme",
        )
        await harness.server._service.complete(call)
        answered = CallContext(
            face="http", method="POST /v1/batches", peer="", key=ApiKey("acme-1", "acme", Role.INFERENCE)
        )
        harness.server._gate.close(answered, 200)

        async def go_on() -> None:
            enter(answered)
            await harness.server._service.complete(dataclasses.replace(call, request_id="line-2"))

        await asyncio.create_task(go_on())
    first, batch, second = lines_of(path)
    assert batch["completion_tokens"] == 0
    for line, request_id, key in ((first, "line-1", ""), (second, "line-2", "acme-1")):
        assert (line["face"], line["tenant"], line["key"], line["status"]) == ("background", "acme", key, "OK")
        assert (line["request_id"], line["prompt_tokens"], line["completion_tokens"]) == (request_id, len(SECRET), 4)
        assert SECRET not in str(line)


async def test_a_name_that_nothing_can_have_is_in_no_line(options):
    del options["api_keys"]
    async with running(**options) as harness, AsyncClient(harness.target) as client:
        for name in (SECRET + "\n", SECRET * 1000):
            with pytest.raises(JpagedError):
                await client.complete("hello", adapter=name)
            with pytest.raises(JpagedError):
                await client.embed(["hello"], adapter=name)
    lines = lines_of(Path(options["audit_log"]))
    assert [(line["status"], line["adapter"]) for line in lines] == [("UNIMPLEMENTED", "")] * 4
