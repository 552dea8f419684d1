"""Prefixes that travel over gRPC: between servers and by way of files, refused, damaged, cut off and abandoned."""

import asyncio
import hashlib
from contextlib import aclosing, asynccontextmanager

import pytest
import trustme
from grpc import aio

from jpaged._proto.v1 import inference_pb2, prefixes_pb2, prefixes_pb2_grpc
from jpaged.client import AsyncClient, Client, PrefixArrival, Tls
from jpaged.client.prefixes import MAGIC
from jpaged.engine.kv.tiers import leaving as leaving_module
from jpaged.errors import (
    Cancelled,
    DeadlineExceeded,
    Incompatible,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    QueueFull,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from jpaged.server.travel import servicer as servicer_module
from jpaged.service.prefixes import parts as parts_module
from jpaged.service.prefixes import travelling as travelling_module
from jpaged.testing import FakeExecutor, seeing
from jpaged.types import SamplingParams
from tests.access.test_keys import FILE, HASHED, OTHER, TOKEN
from tests.server.access.certificates import Files, client_files
from tests.server.harness import details_of, eventually, running

TEXT = "you are a story teller, and tell the stories of everything that there is"
NUM_FULL = len(TEXT) // 4 * 4
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def executor(**sizes):
    return FakeExecutor(**{"num_host_blocks": 40, "max_model_len": 256, "num_blocks": 96, **sizes})


@asynccontextmanager
async def two(a=None, b=None, **options):
    """Two servers with a client each; the second may fetch from the first."""
    a_executor, b_executor = a or executor(), b or executor()
    async with (
        running(executor=a_executor, **options) as first,
        running(executor=b_executor, prefix_peers=[first.target], **options) as second,
        AsyncClient(first.target) as a_client,
        AsyncClient(second.target) as b_client,
    ):
        yield first, a_client, second, b_client
        await is_at_rest(first)
        await is_at_rest(second)


async def is_at_rest(harness):
    """Nothing travels any more, and nothing is held."""
    memory = harness.serving.engine._loop.memory
    await eventually(lambda: not list(memory.held.tables()) and not memory.host._held and not memory.host.has_errands)
    await eventually(lambda: harness.num_blocks_used == 0)


async def saved_by(client, text=TEXT, **of):
    return [chunk async for chunk in client.prefixes.save(text, **of)]


def messages_of(saved):
    """The messages of a saved prefix, to damage."""
    return [prefixes_pb2.LoadPrefixRequest.FromString(chunk[4:]) for chunk in saved[1:]]


def framed(messages):
    contents = [message.SerializeToString() for message in messages]
    return [MAGIC, *(len(content).to_bytes(4, "little") + content for content in contents)]


@pytest.mark.parametrize("way", ["file", "fetch"])
@pytest.mark.parametrize("kind", [FakeExecutor, seeing((None, 6))], ids=["everything", "a window"])
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


# --- what is wrong is never entered ---------------------------------------------------------------------------------


def flip(message):
    piece = message.pieces.pieces[7]
    piece.contents = bytes([piece.contents[0] ^ 1]) + piece.contents[1:]


def stale(message):
    message.pieces.pieces[7].key = hashlib.sha256(b"another").digest()


def exchange(message):
    pieces = message.pieces.pieces
    pieces[7].contents, pieces[8].contents = pieces[8].contents, pieces[7].contents


def move(message):
    message.pieces.pieces[7].index = 9


def shorten(message):
    message.pieces.pieces[7].contents = message.pieces.pieces[7].contents[:-1]


def lengthen(message):
    message.pieces.pieces[7].contents += b"x"


def empty(message):
    message.pieces.pieces[7].contents = b""


def other_group(message):
    message.pieces.pieces[7].kv_group = 1


def beyond(message):
    message.pieces.pieces[7].index = 1000


def twice(message):
    message.pieces.pieces[7].CopyFrom(message.pieces.pieces[6])


def cut_off(message):
    del message.pieces.pieces[7:]


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (flip, r"blocks\[7\].hash: is not that of the contents"),
        (stale, r"blocks\[7\].key: .* is not the key of the block's tokens"),
        (exchange, r"blocks\[7\].hash: is not that of the contents"),
        (move, r"blocks\[9\].key: .* is not the key of the block's tokens"),
        (shorten, r"blocks\[8\]: byte 0 of group 0 came, not blocks\[7\] of group 0 from byte 63 on"),
        (lengthen, r"blocks\[7\].contents: 65 bytes at 0 of a block of 64"),
        (empty, r"blocks\[7\].contents: 0 bytes at 0 of a block of 64"),
        (other_group, r"blocks\[7\].kv_group: is none below 1"),
        (beyond, r"blocks\[1000\]: is beyond the 18 blocks of the tokens"),
        (twice, r"blocks\[6\]: comes twice"),
        (cut_off, r"pieces: end after 7 of 18 blocks"),
    ],
)
async def test_a_damaged_prefix_is_refused_and_none_of_its_damage_is_found(damage, what):
    async with two() as (_, a, _, b):
        output = await a.complete(TEXT, GREEDY)
        messages = messages_of(await saved_by(a))
        damage(messages[1])
        with pytest.raises(InvalidArgument, match=what):
            await b.prefixes.load(framed(messages))
        again = await b.complete(TEXT, GREEDY)
        assert again.usage.cached_tokens == 28  # the seven blocks before
        assert again.outputs[0].token_ids == output.outputs[0].token_ids


async def test_keys_are_made_of_the_tokens_that_the_header_has():
    async with two() as (_, a, _, b):
        await a.complete(TEXT, GREEDY)
        messages = messages_of(await saved_by(a))
        messages[0].header.token_ids[9] += 1
        with pytest.raises(InvalidArgument, match=r"blocks\[2\].key"):
            await b.prefixes.load(framed(messages))
        assert (await b.complete(TEXT, GREEDY)).usage.cached_tokens == 8


@pytest.mark.parametrize(
    ("change", "error", "what"),
    [
        ({"kv_identity": b"x" * 32}, Incompatible, "means something else here: the weights, the scales"),
        ({"block_size": 8}, InvalidArgument, "header: sizes"),
        ({"bytes_per_block": 1 << 40}, InvalidArgument, "header: sizes"),
        ({"num_kv_groups": 9}, InvalidArgument, "header: sizes"),
        ({"num_blocks": 19}, InvalidArgument, "header.num_blocks: 19 blocks are more than the tokens have"),
        ({"adapter": "none"}, Unsupported, "adapter"),
        ({"adapter_digest": b"x" * 32}, Incompatible, "adapter: '' is another here"),
        ({"cache_salt": "s" * 257}, InvalidArgument, "cache_salt: 257 characters"),
    ],
)
async def test_a_header_that_means_something_else_is_refused_before_anything_is_written(change, error, what):
    async with two() as (_, a, _, b):
        await a.complete(TEXT, GREEDY)
        messages = messages_of(await saved_by(a))
        for name, value in change.items():
            setattr(messages[0].header, name, value)
        with pytest.raises(error, match=what):
            await b.prefixes.load(framed(messages))
        assert (await b.complete(TEXT, GREEDY)).usage.cached_tokens == 0


async def test_what_differs_between_two_servers_is_named():
    async with two(executor(), executor(block_size=8)) as (first, a, _, b):
        await a.complete(TEXT, GREEDY)
        what = "block_size is '4' there and '8' here; bytes of a block is '64' there and '128' here"
        with pytest.raises(Incompatible, match=what):
            await b.prefixes.fetch(first.target, TEXT)
        with pytest.raises(Incompatible, match=what):
            await b.prefixes.load(await saved_by(a))


async def test_a_stream_is_a_header_and_then_pieces():
    async with two() as (_, a, second, b):
        await a.complete(TEXT, GREEDY)
        header, pieces = messages_of(await saved_by(a))
        for messages, what in (
            ([pieces], "header: is missing from the first message"),
            ([header, header], "header: comes again"),
            ([header, prefixes_pb2.LoadPrefixRequest()], "part: is missing"),
            ([header], "pieces: end after 0 of 18 blocks"),
            ([], "header: is missing"),
        ):
            with pytest.raises(InvalidArgument, match=what):
                await b.prefixes.load(framed(messages))
        header.header.token_ids.append(300)
        with pytest.raises(InvalidArgument, match="token_ids"):
            await b.prefixes.load(framed([header]))
        header.header.token_ids[-1] = 1
        with pytest.raises(InvalidArgument, match=r"header\.token_ids: 73 tokens; 72 of them fill blocks"):
            await b.prefixes.load(framed([header]))
        call = prefixes_pb2_grpc.PrefixServiceStub(second.channel).SavePrefix(prefixes_pb2.SavePrefixRequest())
        with pytest.raises(aio.AioRpcError) as error:
            await call.read()
        assert details_of(error.value)["BadRequest"].field_violations[0].field == "prefix"


@pytest.mark.parametrize(
    ("saved", "what"),
    [
        ([b"something else altogether"], "does not begin as one"),
        ([MAGIC[:5]], "is cut off"),
        ([], "is cut off"),
        ([MAGIC, b"\xff\xff\xff\xff"], "a message of 4294967295 bytes"),
        ([MAGIC, b"\3\0\0\0abc"], "3 bytes are no message"),
        ([MAGIC, b"\3\0\0\0a"], "is cut off"),
    ],
)
async def test_bytes_that_are_no_saved_prefix_are_refused_by_both_clients(saved, what):
    async with two() as (_, _, second, b):
        with pytest.raises(InvalidArgument, match=f"saved: .*{what}"):
            await b.prefixes.load(saved)

        def load():
            with Client(second.target) as client:
                client.prefixes.load(saved)

        with pytest.raises(InvalidArgument, match=f"saved: .*{what}"):
            await asyncio.to_thread(load)


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
    async with two() as (first, _, second, b):
        async with AsyncClient(first.target, tenant="t") as t, AsyncClient(second.target, tenant="t") as t_there:
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
        with pytest.raises(PermissionDenied, match="is answered on the control port alone"):
            await saved_by(client)
        async with AsyncClient(f"127.0.0.1:{harness.server.control_port}") as operator:
            assert (await operator.prefixes.load(await saved_by(operator))).num_tokens == NUM_FULL


async def test_servers_show_each_other_certificates(tmp_path):
    authority = trustme.CA()
    files = Files(tmp_path)
    files.issue(authority)
    options = files.believe(authority)
    async with running(executor=executor(), **options) as first:
        peer = f"localhost:{first.port}"
        peers = {"prefix_peers": [peer], "prefix_peer_ca": options["tls_client_ca"]}
        with client_files(authority.issue_cert("operator"), authority) as shown:
            tls = Tls(*shown)
            async with (
                running(executor=executor(), **options, **peers) as second,
                AsyncClient(peer, tls=tls) as a,
                AsyncClient(f"localhost:{second.port}", tls=tls) as b,
            ):
                await a.complete(TEXT, GREEDY)
                assert (await b.prefixes.fetch(peer, TEXT)).num_tokens == NUM_FULL
                assert (await b.complete(TEXT, GREEDY)).usage.cached_tokens == NUM_FULL - 4


# --- room, and those who go away ------------------------------------------------------------------------------------


async def test_where_there_is_no_room_it_is_said_what_was_taken():
    async with two(executor(), executor(num_host_blocks=5)) as (first, a, _, b):
        await a.complete(TEXT, GREEDY)
        arrival = await b.prefixes.load(await saved_by(a))
        assert (arrival.num_tokens, arrival.num_loaded_blocks, arrival.is_short_of_room) == (20, 5, True)
        assert arrival.num_found_tokens == NUM_FULL
        assert (await b.complete(TEXT, GREEDY)).usage.cached_tokens == 20
    async with two(executor(num_host_blocks=5), executor()) as (first, a, _, b):
        await a.complete(TEXT, GREEDY)
        arrival = await b.prefixes.fetch(first.target, TEXT)
        assert (arrival.num_tokens, arrival.num_found_tokens, arrival.is_short_of_room) == (20, NUM_FULL, False)


@pytest.mark.parametrize("options", [{"enable_prefix_caching": False}, {"kv_policy": "reserve-max"}, {}])
async def test_where_prefixes_cannot_travel_every_call_says_so(options):
    fake = executor(num_host_blocks=40 if options else 0)
    async with two() as (_, a, _, _), running(executor=fake, **options) as harness:
        await a.complete(TEXT, GREEDY)
        saved = await saved_by(a)
        async with AsyncClient(harness.target) as client:
            for call in (saved_by(client), client.prefixes.load(saved)):
                with pytest.raises(Unsupported, match="prefixes cannot travel: "):
                    await call


async def test_a_reader_that_goes_away_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr(leaving_module, "MAX_STAGED_BLOCKS", 1)
    async with two() as (_, a, _, b):
        await a.complete(TEXT, GREEDY)
        for num_read in (1, 2, 5):
            async with aclosing(a.prefixes.save(TEXT)) as saved:
                for _ in range(num_read):
                    await anext(saved)
        assert (await b.prefixes.load(await saved_by(a))).num_tokens == NUM_FULL


async def test_a_reader_that_takes_nothing_loses_its_stream(monkeypatch):
    monkeypatch.setattr(servicer_module, "_STALL_S", 0.2)
    monkeypatch.setattr(leaving_module, "MAX_STAGED_BLOCKS", 1)

    class Stuck:
        async def write(self, message):
            await asyncio.Event().wait()

    async with running(executor=executor()) as harness, AsyncClient(harness.target) as client:
        await client.complete(TEXT, GREEDY)
        write_to = servicer_module._write
        monkeypatch.setattr(servicer_module, "_write", lambda context, message: write_to(Stuck(), message))
        with pytest.raises(DeadlineExceeded, match=r"nothing of the prefix was taken for 0.2 s"):
            await saved_by(client)
        await is_at_rest(harness)


async def test_whoever_brings_nothing_more_is_told_so_and_what_came_is_kept(monkeypatch):
    monkeypatch.setattr(travelling_module, "_STALL_S", 0.5)
    async with two() as (_, a, _, b):
        await a.complete(TEXT, GREEDY)
        header, pieces = messages_of(await saved_by(a))
        cut_off(pieces)

        async def some():
            for chunk in framed([header, pieces]):
                yield chunk
            await asyncio.sleep(600)

        with pytest.raises(DeadlineExceeded, match=r"nothing of the prefix came for 0.5 s"):
            await b.prefixes.load(some())
        assert (await b.complete(TEXT, GREEDY)).usage.cached_tokens == 28


async def test_whoever_goes_away_in_the_middle_of_bringing_leaves_what_was_whole():
    async with two() as (_, a, second, b):
        output = await a.complete(TEXT, GREEDY)
        messages = messages_of(await saved_by(a))
        last = messages[1].pieces.pieces[7]
        last.contents = last.contents[:30]
        del messages[1].pieces.pieces[8:]
        stub = prefixes_pb2_grpc.PrefixServiceStub(second.channel)
        call = stub.LoadPrefix()
        for message in messages:
            await call.write(message)
        memory = second.serving.engine._loop.memory
        await eventually(lambda: len(memory.host._blocks) == 7)
        call.cancel()
        await is_at_rest(second)
        again = await b.complete(TEXT, GREEDY)
        assert again.usage.cached_tokens == 28
        assert again.outputs[0].token_ids == output.outputs[0].token_ids


async def test_a_server_that_ends_in_the_middle_fails_the_fetch_alone(monkeypatch):
    async with running(executor=executor(), prefix_peers=["127.0.0.1:9"]) as harness:
        async with AsyncClient(harness.target) as client:
            with pytest.raises(Unavailable):
                await client.prefixes.fetch("127.0.0.1:9", TEXT)
            await is_at_rest(harness)
            assert (await client.complete(TEXT, GREEDY)).usage.cached_tokens == 0


async def test_a_few_travel_at_one_time(monkeypatch):
    monkeypatch.setattr(travelling_module, "MAX_TRAVELLING", 2)
    async with two() as (first, a, _, _b):
        await a.complete(TEXT, GREEDY)
        stub = prefixes_pb2_grpc.PrefixServiceStub(first.channel)
        message = messages_of(await saved_by(a))[0]
        open_calls = [stub.LoadPrefix() for _ in range(2)]
        for call in open_calls:
            await call.write(message)
        travelling = first.server._travelling
        await eventually(lambda: travelling._num_open == 2)
        with pytest.raises(QueueFull, match="2 prefixes are on their way, the limit is 2"):
            await saved_by(a)
        for call in open_calls:
            call.cancel()
        await eventually(lambda: travelling._num_open == 0)
        assert len(await saved_by(a)) == 3


async def test_running_streams_go_on_while_prefixes_come_and_go():
    async with two() as (first, a, _, b):
        await a.complete(TEXT, GREEDY)
        sampling = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)
        running_a = asyncio.create_task(a.complete("one", sampling))
        running_b = asyncio.create_task(b.complete("one", sampling))
        for i in range(5):
            assert (await b.prefixes.fetch(first.target, TEXT)).num_tokens == NUM_FULL
            assert (await a.prefixes.load(await saved_by(b))).num_tokens == NUM_FULL
            await a.complete(f"{TEXT} {i}", GREEDY)
        assert (await running_a).outputs[0].token_ids == (await running_b).outputs[0].token_ids


async def test_an_adapters_prefix_is_known_by_what_the_adapter_is(tmp_path):
    (tmp_path / "a").write_text("3")
    (tmp_path / "b").write_text("4")

    class Adapted(FakeExecutor):
        max_loras = 2

    sizes = {"num_host_blocks": 40, "num_blocks": 96}
    async with two(Adapted(**sizes), Adapted(**sizes)) as (first, a, _, b):
        await a.load_adapter("x", str(tmp_path / "a"))
        await a.complete(TEXT, GREEDY, adapter="x")
        with pytest.raises(NotFound):
            await b.prefixes.fetch(first.target, TEXT, adapter="x")
        await b.load_adapter("x", str(tmp_path / "b"))
        with pytest.raises(Incompatible, match="adapter: 'x' is another here than where the prefix comes from"):
            await b.prefixes.fetch(first.target, TEXT, adapter="x")
        await b.unload_adapter("x")
        await b.load_adapter("x", str(tmp_path / "a"))
        assert (await b.prefixes.fetch(first.target, TEXT, adapter="x")).num_tokens == NUM_FULL
        again = await b.complete(TEXT, GREEDY, adapter="x")
        assert again.usage.cached_tokens == NUM_FULL - 4
        assert (await b.complete(TEXT, GREEDY)).usage.cached_tokens == 0


async def test_ids_that_no_prompt_can_have_are_refused():
    async with two() as (first, _, _, b):
        for ids, what in (([300], "token_ids"), ([1] * 300, "token_ids: 300 tokens are not below max_model_len")):
            with pytest.raises(InvalidArgument, match=what):
                await b.prefixes.fetch(first.target, prompt_token_ids=ids)
        request = prefixes_pb2.SavePrefixRequest(token_ids=inference_pb2.TokenIds(ids=[1] * 10), num_known_tokens=9999)
        call = prefixes_pb2_grpc.PrefixServiceStub(first.channel).SavePrefix(request)
        message = await call.read()
        assert message.header.num_blocks == 0


async def test_closed_clients_ask_nobody():
    client = AsyncClient("127.0.0.1:1")
    await client.close()
    for call in (saved_by(client), client.prefixes.load([MAGIC])):
        with pytest.raises(Cancelled, match="the client was closed"):
            await call
