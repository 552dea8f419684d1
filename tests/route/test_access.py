"""Who is let in at a router, and what it shows its servers."""

from pathlib import Path
from typing import Any

import pytest
import trustme

from jpaged.client import AsyncClient
from jpaged.client.channel import Tls
from jpaged.config import AccessOptions
from jpaged.errors import NotFound, PermissionDenied, Unauthenticated, Unavailable
from jpaged.types import SamplingParams
from tests.access.test_keys import FILE, TOKEN
from tests.client.routing.test_resuming import server
from tests.route.rig import routed
from tests.server.access.certificates import Files, client_files
from tests.server.harness import eventually

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
CA = trustme.CA()


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    return str(path)


async def test_keys_are_checked_at_the_router_and_servers_keep_their_tenants_apart(keys, tmp_path):
    audit = tmp_path / "audit"
    async with server() as harness:
        access = AccessOptions(api_keys=keys, audit_log=str(audit))
        async with (
            routed(harness.target, access=access) as router,
            router.client(api_key=TOKEN) as acme,
            router.client() as nobody,
        ):
            assert (await acme.complete("hello", GREEDY)).usage.completion_tokens == 4
            with pytest.raises(Unauthenticated, match="authorization: is missing"):
                await nobody.complete("hello", GREEDY)
            with pytest.raises(PermissionDenied, match="not the tenant of this key"):
                async with router.client(api_key=TOKEN, tenant="another") as liar:
                    await liar.complete("hello", GREEDY)
            with pytest.raises(PermissionDenied, match="role control"):
                await acme.pin_prefix("p", "a long enough prefix")
            harness.faults.gate.clear()
            stream = acme.generate("hello", SamplingParams(max_tokens=40, ignore_eos=True), request_id="r")
            await eventually(lambda: harness.num_open_calls == 1)
            assert list(harness.server._service._open) == [("acme", "r")]
            stream.close()
            harness.faults.release()
        lines = audit.read_text().splitlines()
        assert any('"tenant": "acme"' in line and "Generate" in line for line in lines)
        assert any('"status": "UNAUTHENTICATED"' in line for line in lines)


async def test_an_abort_of_another_tenant_finds_nothing():
    async with (
        server() as harness,
        routed(harness.target) as router,
        router.client(tenant="acme") as acme,
        router.client(tenant="bolt") as other,
    ):
        harness.faults.gate.clear()
        stream = acme.generate("hello", SamplingParams(max_tokens=40, ignore_eos=True), request_id="r")
        await eventually(lambda: harness.num_open_calls == 1)
        with pytest.raises(NotFound, match="no request 'r' is in flight"):
            await other.abort("r")
        await acme.abort("r")
        harness.faults.release()
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].finish_reason == "abort"


async def test_tls_to_callers_and_to_servers(tmp_path):
    of_server, of_router = tmp_path / "server", tmp_path / "router"
    for folder in (of_server, of_router):
        folder.mkdir()
    behind, ahead = Files(of_server), Files(of_router)
    behind.issue(CA, "localhost")
    ahead.issue(CA)
    shown = CA.issue_cert("router")
    with client_files(shown, CA) as (ca, cert, key):
        async with server(**behind.believe(CA)) as harness:
            target = f"dns:///localhost:{harness.port}"
            tls: dict[str, Any] = {"tls": Tls(ca, cert, key)}
            async with routed(target, wait_for=1, access=AccessOptions(**ahead.options), **tls) as router:
                assert list(router.states()) == [f"127.0.0.1:{harness.port}"]  # whose certificate names localhost
                async with AsyncClient(f"localhost:{router.router.port}", tls=Tls(ca)) as client:
                    assert (await client.complete("hello", GREEDY)).usage.completion_tokens == 4
                with pytest.raises(Unavailable):
                    async with AsyncClient(router.target) as clear:
                        await clear.complete("hello", GREEDY)
            async with routed(target, wait_for=0, tls=Tls(ca)) as router:  # it shows nothing
                await eventually(lambda: "UNAVAILABLE" in "".join(router.states().values()))


async def test_certificates_that_change_are_shown_to_servers_without_a_new_start(tmp_path):
    """A connection that stands goes on; one that is made from then on has the new ones."""
    folder = tmp_path / "server"
    folder.mkdir()
    files = Files(folder)
    files.issue(CA, "localhost")
    ca, cert, key = tmp_path / "ca.pem", tmp_path / "cert.pem", tmp_path / "key.pem"

    def shown(by: trustme.CA) -> None:
        one = by.issue_cert("router")
        one.private_key_pem.write_to_path(str(key))
        one.cert_chain_pems[0].write_to_path(str(cert))

    CA.cert_pem.write_to_path(str(ca))
    shown(trustme.CA())  # whom the server does not believe
    tls = Tls(str(ca), str(cert), str(key))
    async with (
        server(**files.believe(CA)) as harness,
        routed(f"dns:///localhost:{harness.port}", wait_for=0, tls=tls) as router,
    ):
        await eventually(lambda: "UNAVAILABLE" in "".join(router.states().values()))
        shown(CA)
        await router.until(1)
        (member,) = router.router.fleet.members.values()
        before = router.router.fleet._files_number
        shown(trustme.CA())
        await eventually(lambda: router.router.fleet._files_number > before)
        async with router.client() as client:
            assert (await client.complete("hello", GREEDY)).usage.completion_tokens == 4
        assert [*router.router.fleet.members.values()] == [member]
