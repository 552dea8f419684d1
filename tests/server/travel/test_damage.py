"""What is wrong of a prefix is told by name, and never entered."""

import asyncio
import hashlib

import pytest
from grpc import aio

from jpaged._proto.v1 import prefixes_pb2, prefixes_pb2_grpc
from jpaged.client import Client
from jpaged.client.prefixes import MAGIC
from jpaged.engine.kv_cache.offload.host import HostTier
from jpaged.errors import (
    Incompatible,
    InternalError,
    InvalidArgument,
    Unsupported,
)
from jpaged.server import kv_transfer as servicer_module
from jpaged.server.kv_transfer import build_response
from tests.server.harness import error_details
from tests.server.travel.pairs import GREEDY, NUM_FULL, TEXT, executor, framed, messages_of, saved_by, two


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
        (flip, r"blocks\[7\].hash: does not match the contents"),
        (stale, r"blocks\[7\].key: .* is not the key of the block's tokens"),
        (exchange, r"blocks\[7\].hash: does not match the contents"),
        (move, r"blocks\[9\].key: .* is not the key of the block's tokens"),
        (shorten, r"blocks\[8\]: starts at byte 0 of group 0; expected blocks\[7\] of group 0 from byte 63"),
        (lengthen, r"blocks\[7\].contents: has 65 bytes at 0, which are not part of a block of 64"),
        (empty, r"blocks\[7\].contents: has 0 bytes at 0, which are not part of a block of 64"),
        (other_group, r"blocks\[7\].kv_group: 1 is not below 1"),
        (beyond, r"blocks\[1000\]: is beyond the 18 blocks of the tokens"),
        (twice, r"blocks\[6\]: is sent twice"),
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


async def test_no_more_comes_than_was_announced_and_nobody_makes_room_for_it(monkeypatch):
    reserved = []
    reserve = HostTier.reserve

    def noted(tier, num_blocks):
        reserved.append(num_blocks)
        return reserve(tier, num_blocks)

    async with two() as (_, a, _, b):
        await a.complete(TEXT, GREEDY)
        messages = messages_of(await saved_by(a))
        messages[0].header.num_blocks = 7
        pieces = messages[1].pieces.pieces
        monkeypatch.setattr(HostTier, "reserve", noted)
        what = r"blocks\[7\]: is one more than the 7 blocks that were announced"
        with pytest.raises(InvalidArgument, match=what):
            await b.prefixes.load(framed(messages))
        first = prefixes_pb2.PrefixPiece(contents=pieces[0].contents[:1], key=pieces[0].key)
        del pieces[:]
        pieces.extend([first] * 100)
        with pytest.raises(InvalidArgument, match=r"blocks\[0\]: starts at byte 0 of group 0; expected"):
            await b.prefixes.load(framed(messages))
        assert max(reserved, default=0) <= 7


@pytest.mark.parametrize("num_pieces", [0, 2732])
async def test_a_message_has_as_many_pieces_as_it_needs(num_pieces):
    async with two() as (_, a, _, b):
        await a.complete(TEXT, GREEDY)
        header, pieces = messages_of(await saved_by(a))
        first = pieces.pieces.pieces[0]
        del pieces.pieces.pieces[:]
        pieces.pieces.SetInParent()
        pieces.pieces.pieces.extend([first] * num_pieces)
        with pytest.raises(InvalidArgument, match=f"pieces: a message has {num_pieces}: must be from 1 to 2731"):
            await b.prefixes.load(framed([header, pieces]))


async def test_where_requests_have_to_be_smaller_than_messages_it_is_said():
    async with two(max_request_size=0.25) as (first, a, _, b):
        await a.complete(TEXT, GREEDY)
        what = "prefixes cannot be loaded: max_request_size is 0.25 MiB; prefix messages have up to 0.250977"
        with pytest.raises(Unsupported, match=what):
            await b.prefixes.load(await saved_by(a))
        assert (await b.prefixes.fetch(first.target, TEXT)).num_tokens == NUM_FULL


@pytest.mark.parametrize(
    "change",
    [{"cache_salt": "another"}, {"adapter": "another"}, {"token_ids": [1] * 4}],
    ids=lambda change: next(iter(change)),
)
async def test_a_peer_that_answers_with_another_prefix_is_not_believed(monkeypatch, change):
    async with two() as (first, a, _, b):
        await a.complete(TEXT, GREEDY)

        def another(part):
            message = build_response(part)
            if message.HasField("header"):
                for name in change:
                    message.header.ClearField(name)
                message.header.MergeFrom(prefixes_pb2.PrefixHeader(**change))
            return message

        monkeypatch.setattr(servicer_module, "build_response", another)
        with pytest.raises(InternalError, match="returned a different prefix than requested"):
            await b.prefixes.fetch(first.target, TEXT)


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
        ({"kv_identity": b"x" * 32}, Incompatible, "incompatible with this server: the weights, the scales"),
        ({"block_size": 8}, InvalidArgument, "header: sizes"),
        ({"bytes_per_block": 1 << 40}, InvalidArgument, "header: sizes"),
        ({"num_kv_groups": 9}, InvalidArgument, "header: sizes"),
        ({"num_blocks": 19}, InvalidArgument, "header.num_blocks: 19 blocks are more than the tokens have"),
        ({"adapter": "none"}, Unsupported, "adapter"),
        ({"adapter_digest": b"x" * 32}, Incompatible, "adapter: '' differs here"),
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
            ([header, header], "header: may only be in the first message"),
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
        with pytest.raises(InvalidArgument, match=r"header\.token_ids: 73 tokens; only 72 of them fill blocks"):
            await b.prefixes.load(framed([header]))
        call = prefixes_pb2_grpc.PrefixServiceStub(second.channel).SavePrefix(prefixes_pb2.SavePrefixRequest())
        with pytest.raises(aio.AioRpcError) as error:
            await call.read()
        assert error_details(error.value)["BadRequest"].field_violations[0].field == "prefix"


@pytest.mark.parametrize(
    ("saved", "what"),
    [
        ([b"something else altogether"], "its first bytes are wrong"),
        ([MAGIC[:5]], "is truncated"),
        ([], "is truncated"),
        ([MAGIC, b"\xff\xff\xff\xff"], "a message of 4294967295 bytes"),
        ([MAGIC, b"\3\0\0\0abc"], "3 bytes are not a message"),
        ([MAGIC, b"\3\0\0\0a"], "is truncated"),
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
