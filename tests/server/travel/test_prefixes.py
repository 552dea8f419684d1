"""Prefixes that travel over gRPC, between servers and by way of files: which, whose, and who may."""

import asyncio
import contextlib
from typing import Any

import pytest
import trustme

from jpaged.client import AsyncClient, Client, PrefixArrival, Tls
from jpaged.client.prefixes import MAGIC
from jpaged.config import AccessOptions
from jpaged.errors import (
    InvalidArgument,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from jpaged.server.kv_transfer import PeerServers
from jpaged.service import kv_protocol as parts_module
from jpaged.service.kv_protocol import TransferHeader
from jpaged.service.kv_transfer import Prefix
from jpaged.testing import ByteTokenizer, FakeExecutor, seeing
from jpaged.types import Prompt, SamplingParams
from tests.access.test_keys import FILE, HASHED, OTHER, TOKEN
from tests.server.access.certificates import Files, client_files
from tests.server.harness import running
from tests.server.travel.pairs import GREEDY, NUM_FULL, TEXT, executor, saved_by, two


@pytest.mark.parametrize("way", ["file", "fetch"])
@pytest.mark.parametrize(
    "kind",
    [FakeExecutor, seeing((None, 6)), seeing(((6, 5),))],
    ids=["everything", "a window", "first tokens and a window"],
)
async def test_a_prefix_travels_and_the_next_request_finds_it(way, kind):
    sizes = {"num_host_blocks": 60, "num_blocks": 96}
    async with two(kind(**sizes), kind(**sizes)) as (first, a, _, b):
        output = await a.complete(TEXT, GREEDY)
        arrival = await (b.prefixes.load(await saved_by(a)) if way == "file" else b.prefixes.fetch(first.target, TEXT))
        assert (arrival.num_tokens, arrival.num_found_tokens, arrival.num_known_blocks) == (NUM_FULL, NUM_FULL, 0)
        assert not arrival.is_short_of_room
        again = await b.complete(TEXT, GREEDY)
        assert again.usage.cached_tokens == NUM_FULL - 4  # the last token always runs
        assert again.outputs[0].token_ids == output.outputs[0].token_ids
        longer = await b.complete(f"{TEXT}, and more", GREEDY)
        assert longer.usage.cached_tokens >= NUM_FULL
        assert longer.outputs[0].token_ids == (await a.complete(f"{TEXT}, and more", GREEDY)).outputs[0].token_ids


async def test_only_what_is_missing_is_fetched():
    async with two() as (first, a, _, b):
        await a.complete(TEXT, GREEDY)
        await b.complete(TEXT[:20], GREEDY)
        arrival = await b.prefixes.fetch(first.target, TEXT)
        assert arrival == PrefixArrival(NUM_FULL, NUM_FULL, NUM_FULL // 4 - 5, 0, False)
        assert await b.prefixes.fetch(first.target, TEXT) == PrefixArrival(NUM_FULL, NUM_FULL, 0, NUM_FULL // 4, False)
        assert (await b.prefixes.load(await saved_by(a))).num_known_blocks == NUM_FULL // 4
        none = await b.prefixes.fetch(first.target, "nobody has asked for this yet")
        assert none == PrefixArrival(0, 0, 0, 0, False)


async def test_salt_and_ids_are_as_in_requests():
    async with two() as (first, a, _, b):
        salted = SamplingParams(max_tokens=2, cache_salt="s")
        ids = list(TEXT.encode())
        await a.complete(prompt_token_ids=ids, sampling=salted)
        assert (await b.prefixes.fetch(first.target, prompt_token_ids=ids)).num_tokens == 0
        saved = [chunk async for chunk in a.prefixes.save(prompt_token_ids=ids, cache_salt="s")]
        assert (await b.prefixes.load(saved)).num_tokens == NUM_FULL
        assert (await b.complete(TEXT, GREEDY)).usage.cached_tokens == 0
        assert (await b.complete(TEXT, salted)).usage.cached_tokens == NUM_FULL - 4
        with pytest.raises(InvalidArgument, match="cache_salt: 300 characters; at most 256"):
            await saved_by(a, cache_salt="s" * 300)


async def test_large_blocks_come_in_pieces_and_small_ones_together(monkeypatch):
    monkeypatch.setattr(parts_module, "MAX_PIECES_BYTES", 96 + 40)
    async with two() as (_, a, _, b):
        await a.complete(TEXT, GREEDY)
        saved = await saved_by(a)
        assert len(saved) == 2 + NUM_FULL // 4 * 2  # a block is of 64 bytes
        assert (await b.prefixes.load(saved)).num_tokens == NUM_FULL
        monkeypatch.setattr(parts_module, "MAX_PIECES_BYTES", 1 << 20)
        assert len(await saved_by(a)) == 3
        assert (await b.complete(TEXT, GREEDY)).usage.cached_tokens == NUM_FULL - 4


async def test_a_file_is_read_in_any_pieces_by_either_client(tmp_path):
    async with two() as (first, a, second, b):
        await a.complete(TEXT, GREEDY)
        path = tmp_path / "prefix"

        def save_and_load():
            with Client(first.target) as one, Client(second.target) as other:
                path.write_bytes(b"".join(one.prefixes.save(TEXT)))
                with path.open("rb") as file:
                    return other.prefixes.load(iter(lambda: file.read(37), b""))

        assert (await asyncio.to_thread(save_and_load)).num_tokens == NUM_FULL
        assert (await b.complete(TEXT, GREEDY)).usage.cached_tokens == NUM_FULL - 4


# --- who may, and whose ---------------------------------------------------------------------------------------------


async def test_a_prefix_is_of_the_tenant_of_the_key_on_both_sides(tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text(FILE.replace('role = "observe"', 'role = "control"'))
    async with two(api_keys=str(keys)) as (first, nobody, second, _):
        with pytest.raises(Unauthenticated):
            await saved_by(nobody)
        async with (
            AsyncClient(first.target, api_key=TOKEN) as asks,
            AsyncClient(second.target, api_key=TOKEN) as asks_there,
            AsyncClient(first.target, api_key=OTHER) as acme,
            AsyncClient(second.target, api_key=OTHER) as acme_there,
            AsyncClient(second.target, api_key=HASHED) as bolt_there,
        ):
            await asks.complete(TEXT, GREEDY)
            for call in (saved_by(asks), asks.prefixes.load([MAGIC]), asks.prefixes.fetch("x", TEXT)):
                with pytest.raises(PermissionDenied, match="needs a key of the role control"):
                    await call
            assert (await bolt_there.prefixes.fetch(first.target, TEXT)).num_tokens == 0  # acme's is not bolt's
            assert (await acme_there.prefixes.fetch(first.target, TEXT)).num_tokens == NUM_FULL
            assert (await asks_there.complete(TEXT, GREEDY)).usage.cached_tokens == NUM_FULL - 4
            assert (await bolt_there.complete(TEXT, GREEDY)).usage.cached_tokens == 0
            assert (await bolt_there.prefixes.load(await saved_by(acme))).num_tokens == NUM_FULL  # it is bolt's now


async def test_named_tenants_share_nothing_either():
    async with (
        two() as (first, _, second, b),
        AsyncClient(first.target, tenant="t") as t,
        AsyncClient(second.target, tenant="t") as t_there,
    ):
        await t.complete(TEXT, GREEDY)
        assert (await b.prefixes.fetch(first.target, TEXT)).num_tokens == 0
        assert (await t_there.prefixes.fetch(first.target, TEXT)).num_tokens == NUM_FULL
        assert (await b.complete(TEXT, GREEDY)).usage.cached_tokens == 0
        assert (await t_there.complete(TEXT, GREEDY)).usage.cached_tokens == NUM_FULL - 4


async def test_a_server_connects_to_its_peers_alone_and_acts_can_be_turned_off():
    async with two() as (_, a, second, b):
        for source in ("127.0.0.1:1", "", "localhost:50051", second.target):
            with pytest.raises(PermissionDenied, match="is not one of this server's prefix_peers"):
                await b.prefixes.fetch(source, TEXT)
        with pytest.raises(PermissionDenied, match="prefix_peers"):
            await a.prefixes.fetch(second.target, TEXT)
    async with running(executor=executor(), disable_control=True) as harness, AsyncClient(harness.target) as client:
        for call in (saved_by(client), client.prefixes.load([MAGIC]), client.prefixes.fetch("x", TEXT)):
            with pytest.raises(PermissionDenied, match="disable_control"):
                await call


async def test_on_a_port_for_acts_of_control_prefixes_travel_there_alone():
    async with running(executor=executor(), control_port=0) as harness, AsyncClient(harness.target) as client:
        await client.complete(TEXT, GREEDY)
        with pytest.raises(PermissionDenied, match="is served only on the control port"):
            await saved_by(client)
        async with AsyncClient(f"127.0.0.1:{harness.server.control_port}") as operator:
            assert (await operator.prefixes.load(await saved_by(operator))).num_tokens == NUM_FULL


@contextlib.asynccontextmanager
async def two_that_show_certificates(folder, believed=None):
    """A server, one that fetches from it and believes what the file says, and clients of both."""
    authority, files = trustme.CA(), Files(folder)
    files.issue(authority)
    options = files.believe(authority)
    async with running(executor=executor(), **options) as first:
        peer = f"localhost:{first.port}"
        peers: dict[str, Any] = {"prefix_peers": [peer], "prefix_peer_ca": str(believed or options["tls_client_ca"])}
        with client_files(authority.issue_cert("operator"), authority) as shown:
            tls = Tls(*shown)
            async with (
                running(executor=executor(), **options, **peers) as second,
                AsyncClient(peer, tls=tls) as a,
                AsyncClient(f"localhost:{second.port}", tls=tls) as b,
            ):
                await a.complete(TEXT, GREEDY)
                yield authority, peer, b, {**options, **peers}


def replace(path, authority):
    new = path.with_suffix(".new")
    new.write_bytes(authority.cert_pem.bytes())
    new.replace(path)


async def test_servers_show_each_other_certificates(tmp_path):
    async with two_that_show_certificates(tmp_path) as (_, peer, b, _):
        assert (await b.prefixes.fetch(peer, TEXT)).num_tokens == NUM_FULL
        assert (await b.complete(TEXT, GREEDY)).usage.cached_tokens == NUM_FULL - 4


async def test_certificates_of_peers_are_believed_from_when_the_files_have_changed(tmp_path):
    believed = tmp_path / "peers.pem"
    replace(believed, trustme.CA())  # somebody else's
    async with two_that_show_certificates(tmp_path, believed) as (authority, peer, b, _):
        with pytest.raises(Unavailable):
            await b.prefixes.fetch(peer, TEXT)
        replace(believed, authority)
        assert (await b.prefixes.fetch(peer, TEXT)).num_tokens == NUM_FULL


async def test_what_is_on_its_way_from_a_peer_goes_on_when_certificates_change(tmp_path):
    believed = tmp_path / "peers.pem"
    replace(believed, trustme.CA())
    async with two_that_show_certificates(tmp_path, believed) as (authority, peer, _, options):
        replace(believed, authority)
        peers = PeerServers(AccessOptions(**options))
        prefix = Prefix(prompt=Prompt(token_ids=ByteTokenizer().encode(TEXT)))
        whole = [part async for part in peers.save(peer, prefix, 0)]
        assert isinstance(whole[0], TransferHeader)
        assert len(whole) > 1
        going = peers.save(peer, prefix, 0)
        parts = [await anext(going)]
        replace(believed, trustme.CA())
        with pytest.raises(Unavailable):
            await anext(peers.save(peer, prefix, 0))
        parts += [part async for part in going]
        assert parts == whole
        await peers.close()
