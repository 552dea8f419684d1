"""What decode servers show to prefill servers, and models whose blocks are more than one kind or whose weights vary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trustme

from jpaged._proto.v1 import control_pb2, prefill_pb2, prefill_pb2_grpc
from jpaged.config import EngineConfig
from jpaged.errors import InvalidArgument
from jpaged.peers import Prefills
from jpaged.testing import FakeExecutor, SeveralStepsExecutor, SpeculatingExecutor, seeing, with_adapters
from tests.server.access.certificates import Files, client_files
from tests.server.harness import collect, error_details, failure_of, request, running
from tests.server.roles.test_roles import LONG, apart, fake, folded, pair

TOKEN = "a-token-of-the-prefill-servers"
KEYS = f"""
[[keys]]
id = "decode"
tenant = "decoders"
token = "{TOKEN}"
role = "control"

[[keys]]
id = "client"
tenant = "acme"
token = "{TOKEN}-of-a-client"
role = "inference"
"""


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    return str(path)


async def test_a_key_lets_a_decode_server_in_for_all_tenants(keys: str, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(f"{TOKEN}\n")
    async with pair(prefill={"api_keys": keys}, decode={"prefill_api_key_file": str(path)}) as both:
        for tenant in ("acme", "other"):
            told = await both.generate(request(LONG), metadata=(("x-jpaged-tenant", tenant),))
            assert folded(told)[0][0]
        assert (both.received.num_asked, dict(both.failures)) == (2, {})
        assert both.received.num_blocks_received == 2 * (len(LONG) // 4)


@pytest.mark.parametrize("token", [None, f"{TOKEN}-of-a-client"])
async def test_without_a_key_of_the_role_control_prompts_are_computed_here(
    keys: str, tmp_path: Path, token: str | None
) -> None:
    path = tmp_path / "key"
    path.write_text(str(token))
    options = {} if token is None else {"prefill_api_key_file": str(path)}
    async with pair(prefill={"api_keys": keys}, decode=options) as both:
        assert folded(await both.generate(request(LONG)))[0][0]
        assert (both.failures["prefill"], both.sent.num_prefills_for_others) == (1, 0)


async def test_servers_show_each_other_certificates(tmp_path: Path) -> None:
    authority = trustme.CA()
    files = Files(tmp_path)
    files.issue(authority)
    client = authority.issue_cert("decode")
    with client_files(client, authority) as (ca, chain, key):
        shown = {"prefill_tls_ca": ca, "prefill_tls_cert": chain, "prefill_tls_key": key}
        async with running(executor=fake(), role="prefill", **files.believe(authority)) as prefill:
            target = f"localhost:{prefill.port}"
            async with running(executor=fake(), **apart(target, **shown)) as decode:
                await collect(decode.inference.Generate(request(LONG)))
                assert not decode.serving.role_counts.num_failed
                assert decode.serving.role_counts.load().num_blocks_received == len(LONG) // 4
            async with running(executor=fake(), **apart(target, prefill_tls_ca=ca)) as stranger:
                await collect(stranger.inference.Generate(request(LONG)))
                assert stranger.serving.role_counts.num_failed["prefill"] == 1


@pytest.mark.parametrize(
    ("option", "content", "problem"),
    [
        ("prefill_api_key_file", None, "cannot be read: "),
        ("prefill_api_key_file", "", "has 0 characters, not 1 to 4096"),
        ("prefill_api_key_file", "two words", "must be printable ASCII without spaces"),
        ("prefill_tls_ca", None, "cannot be read: "),
    ],
)
async def test_files_that_are_no_use_are_refused_by_their_option(
    option: str, content: str | None, problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_text(content)
    options = EngineConfig.load({"role": "decode", "prefill_target": ("a:1",), option: str(path)}).roles
    with pytest.raises(InvalidArgument, match=problem) as refused:
        Prefills(options)
    assert refused.value.field == option


async def test_a_target_without_a_port_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="'somewhere' is not HOST:PORT"):
        Prefills(EngineConfig.load({"role": "decode", "prefill_target": ("somewhere",)}).roles)


KINDS: dict[str, type[FakeExecutor]] = {
    "windows": seeing((8, None)),
    "narrow windows": seeing((8, 20)),
    "first tokens and a window": seeing(((8, 5),)),
    "several steps": SeveralStepsExecutor,
    "a draft model": SpeculatingExecutor,
}


@pytest.mark.parametrize("kind", KINDS)
async def test_tokens_are_the_same_whatever_blocks_hold(kind: str) -> None:
    message = request(LONG, max_tokens=40, temperature=1.0, seed=2, n=2)
    async with running(executor=fake(KINDS[kind])) as one:
        wanted = folded(await collect(one.inference.Generate(message)))
    async with pair(executors=(fake(KINDS[kind]), fake(KINDS[kind]))) as both:
        assert folded(await both.generate(message)) == wanted
        assert not both.failures
        assert both.received.num_blocks_received > 0
        assert both.decode.serving.engine.load().num_prefix_hit_tokens > 0


async def test_adapters_are_those_of_the_name_and_the_contents(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("3")
    other.write_text("4")
    kind = with_adapters(2)
    message = request(LONG, max_tokens=16)
    message.adapter = "tuned"
    async with running(executor=fake(kind), enable_lora=True) as alone:
        await alone.control.LoadAdapter(control_pb2.LoadAdapterRequest(name="tuned", path=str(one)))
        wanted = folded(await collect(alone.inference.Generate(message)))
    for path, failures in ((one, {}), (other, {"prefill": 1})):
        async with pair(executors=(fake(kind), fake(kind)), enable_lora=True) as both:
            await both.prefill.control.LoadAdapter(control_pb2.LoadAdapterRequest(name="tuned", path=str(path)))
            await both.decode.control.LoadAdapter(control_pb2.LoadAdapterRequest(name="tuned", path=str(one)))
            assert folded(await both.generate(message)) == wanted
            assert dict(both.failures) == failures


async def test_what_is_no_prompt_of_another_server_is_refused() -> None:
    async with running(executor=fake(), role="prefill") as harness:
        stub: Any = prefill_pb2_grpc.PrefillServiceStub(harness.channel)
        identity = harness.executor.host_blocks
        assert identity is not None
        for asked, field in (
            (prefill_pb2.PrefillRequest(kv_identity=b"another"), "kv_identity"),
            (prefill_pb2.PrefillRequest(request=request("hello")), "sampling.max_tokens"),
            (prefill_pb2.PrefillRequest(request=request("hello", max_tokens=1, beam_width=2)), "request"),
            (prefill_pb2.PrefillRequest(request=request("hello", max_tokens=1), adapter_digest=b"x"), "adapter_digest"),
        ):
            if not asked.kv_identity:
                asked.kv_identity = identity.kv_identity()
            error = await failure_of(stub.Prefill(asked))
            assert error_details(error)["BadRequest"].field_violations[0].field == field
        assert harness.num_open_calls == 0


async def test_only_prefill_servers_compute_prompts_for_others() -> None:
    async with running() as harness:
        stub: Any = prefill_pb2_grpc.PrefillServiceStub(harness.channel)
        error = await failure_of(stub.Prefill(prefill_pb2.PrefillRequest(request=request("hello", max_tokens=1))))
        assert error.code().name == "UNIMPLEMENTED"
