"""TLS on every port: who is believed, who has to show a certificate, and files that change while the server runs."""

import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
import trustme
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jpaged._proto.v1 import inference_pb2_grpc
from jpaged.access.tls import CertificateFiles
from jpaged.config import EngineConfig
from jpaged.errors import InvalidArgument
from tests.server.access.certificates import Files, channel, client_files, credentials
from tests.server.harness import collect, eventually, request, running

CA, OTHER = trustme.CA(), trustme.CA()


@pytest.fixture
def files(tmp_path: Path) -> Files:
    files = Files(tmp_path)
    files.issue(CA)
    return files


async def is_answered(port: int, shown: Any) -> bool:
    """Whether a new connection comes about and a call over it is answered."""
    async with channel(port, shown) as connection:
        stub: Any = health_pb2_grpc.HealthStub(connection)
        try:
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
        except aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False
        return True


def https(url: str, authority: trustme.CA, client: tuple[str, str] | None = None) -> httpx2.AsyncClient:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    if client is not None:
        context.load_cert_chain(*client)
    return httpx2.AsyncClient(base_url=url.replace("http://", "https://"), verify=context)


async def status_of(http: httpx2.AsyncClient) -> int | None:
    try:
        return (await http.get("/health")).status_code
    except (httpx2.ConnectError, httpx2.ReadError, httpx2.RemoteProtocolError):
        return None


async def test_a_client_that_knows_the_authority_is_served_and_others_turn_away(files):
    async with running(http_port=0, **files.options) as harness:
        async with channel(harness.port, credentials(CA)) as connection:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(connection)
            assert (await collect(stub.Generate(request())))[-1].usage.completion_tokens == 8
        assert not await is_answered(harness.port, credentials(OTHER))
        async with https(harness.http_url, CA) as http:
            assert (await http.get("/v1/models")).json()["data"][0]["id"] == "fake"
        async with https(harness.http_url, OTHER) as http:
            assert await status_of(http) is None
        async with httpx2.AsyncClient(base_url=harness.http_url) as http:  # in clear
            assert await status_of(http) is None


async def test_a_client_without_a_certificate_is_turned_away_where_one_is_wanted(files):
    mine, others = CA.issue_cert("client@example.org"), OTHER.issue_cert("client@example.org")
    async with running(http_port=0, **files.believe(CA)) as harness:
        assert await is_answered(harness.port, credentials(CA, mine))
        assert not await is_answered(harness.port, credentials(CA))
        assert not await is_answered(harness.port, credentials(CA, others))
        for client, answered in ((mine, 200), (others, None)):
            with client_files(client, CA) as (_, chain, key):
                async with https(harness.http_url, CA, (chain, key)) as http:
                    assert await status_of(http) == answered
        async with https(harness.http_url, CA) as http:
            assert await status_of(http) is None


async def test_new_files_are_for_new_connections_and_old_ones_go_on(files):
    async with running(http_port=0, **files.options) as harness, channel(harness.port, credentials(CA)) as connection:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(connection)
        harness.faults.hold_after(3)
        call = stub.Generate(request(max_tokens=20))
        await call.read()
        now = harness.server._gate.certificates
        assert now is not None
        before = now.now
        files.issue(OTHER)
        await eventually(lambda: now.now is not before)
        assert await is_answered(harness.port, credentials(OTHER))
        assert not await is_answered(harness.port, credentials(CA))
        async with https(harness.http_url, OTHER) as http:
            assert await status_of(http) == 200
        async with https(harness.http_url, CA) as http:
            assert await status_of(http) is None
        harness.faults.release()
        assert (await collect(call))[-1].usage.completion_tokens == 20


async def test_new_authorities_of_clients_take_the_place_of_the_old_ones(files):
    old, new = (authority.issue_cert("client@example.org") for authority in (CA, OTHER))
    async with running(http_port=0, **files.believe(CA)) as harness:
        now = harness.server._gate.certificates
        assert now is not None
        before = now.now
        files.believe(OTHER)
        await eventually(lambda: now.now is not before)
        assert await is_answered(harness.port, credentials(CA, new))
        assert not await is_answered(harness.port, credentials(CA, old))
        for client, answered in ((new, 200), (old, None)):
            with client_files(client, CA) as (_, chain, key):
                async with https(harness.http_url, CA, (chain, key)) as http:
                    assert await status_of(http) == answered


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_session_of_a_client_whose_authority_is_gone_lets_it_in_no_more(
    files: Files, version: ssl.TLSVersion
) -> None:
    now = CertificateFiles(EngineConfig.load(files.believe(CA)).access)
    listening, shown = now.context(), ssl.create_default_context()
    CA.configure_trust(shown)
    shown.minimum_version = shown.maximum_version = version
    with client_files(CA.issue_cert("client@example.org"), CA) as (_, chain, key):
        shown.load_cert_chain(chain, key)
    session = meet(listening, shown)
    assert meet(listening, shown, session) is not None
    files.believe(OTHER)
    now.look_again()
    for brought in (session, None):
        with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
            meet(listening, shown, brought)


def meet(server: ssl.SSLContext, client: ssl.SSLContext, session: ssl.SSLSession | None = None) -> Any:
    """Shake hands, and read what comes with it; returns the client's session."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    mine = client.wrap_bio(back, there, server_hostname="localhost", session=session)
    theirs = server.wrap_bio(there, back, server_side=True)
    for end in (mine, theirs, mine, theirs):
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()
    theirs.write(b"x")
    assert mine.read(1) == b"x"
    return mine.session


def test_files_that_do_not_go_together_change_nothing(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    now = CertificateFiles(EngineConfig.load(files.options).access)
    before = now.now
    (files.folder / "server.key").write_bytes(OTHER.issue_cert("localhost").private_key_pem.bytes())
    now.look_again()
    assert now.now is before
    assert "the certificates were not reloaded: tls_cert: " in caplog.text
    files.issue(OTHER)
    now.look_again()
    assert now.now is not before


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"tls_cert": "server.pem"}, "tls_key: is missing: tls_cert .* requires it"),
        ({"tls_key": "server.key"}, "tls_cert: is missing: tls_key .* requires it"),
        ({"tls_client_ca": "server.pem"}, "tls_client_ca: .* needs tls_cert and tls_key"),
        ({"tls_cert": "none.pem", "tls_key": "server.key"}, "tls_cert: cannot be read: .*none.pem: No such file"),
        ({"tls_cert": "server.pem", "tls_key": "server.pem"}, "tls_cert: .* are not a certificate and its key"),
        (
            {"tls_cert": "server.pem", "tls_key": "server.key", "tls_client_ca": "server.key"},
            "tls_client_ca: .* has no certificate",
        ),
    ],
)
async def test_files_that_cannot_serve_keep_the_server_from_starting(files, options, problem):
    paths: dict[str, Any] = {name: str(files.folder / path) for name, path in options.items()}
    with pytest.raises(InvalidArgument, match=problem):
        async with running(**paths):
            pass
