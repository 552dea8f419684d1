"""A prompt of token ids goes where its beginning really is, as servers tell it over real sockets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from jpaged._proto.v1 import control_pb2, inference_pb2
from jpaged.config import AccessOptions, EngineConfig, KVEventsOptions
from jpaged.kvevents.encoding import Encoder
from jpaged.kvevents.publisher import Publisher
from jpaged.pool import Change, PrefixOwner, Removed, Stored
from jpaged.route.kv_event_index import KVEventEndpoints, KVEventIndex
from jpaged.route.prefix_table import parse_prompt_prefix
from jpaged.route.router import RouteOptions, Router
from tests.client.routing.test_resuming import server
from tests.route.rig import Routed, routed
from tests.server.harness import Harness, collect, eventually

PROMPT, OTHER = list(range(32, 96)), list(range(96, 160))
SIZE = 4
NOBODY = PrefixOwner()
_INFO = control_pb2.GetServerInfoRequest()


def keys_of(token_ids: Sequence[int], owner: PrefixOwner) -> list[bytes]:
    """A key of each block, which no other has."""
    ends = range(SIZE, len(token_ids) + 1, SIZE)
    return [hash((tuple(token_ids[:end]), owner)).to_bytes(8, "big", signed=True) for end in ends]


def stored(token_ids: Sequence[int], owner: PrefixOwner = NOBODY) -> list[Change]:
    """The changes of a step that has computed a prompt."""
    found: list[Change] = []
    for index, key in enumerate(keys := keys_of(token_ids, owner)):
        tokens = tuple(token_ids[index * SIZE : (index + 1) * SIZE])
        found.append(Stored("device", key, 0, keys[index - 1] if index else None, tokens, owner))
    return found


def removed(token_ids: Sequence[int], owner: PrefixOwner = NOBODY) -> list[Change]:
    return [Removed("device", key, 0) for key in keys_of(token_ids, owner)]


def events_at(folder: Path, name: str, **given: Any) -> dict[str, Any]:
    """The options of a server that tells."""
    endpoints = {"kv_events_endpoint": f"ipc://{folder}/{name}", "kv_events_replay_endpoint": f"ipc://{folder}/{name}r"}
    return endpoints | given


def telling(folder: Path, name: str, rank: int = 0) -> Publisher:
    """What tells in the place of a server's engine."""
    return Publisher(KVEventsOptions(**events_at(folder, name)), Encoder(SIZE, rank=rank))


def ask(token_ids: Sequence[int], request_id: str | None = None, **sampling: Any) -> inference_pb2.GenerateRequest:
    values: dict[str, Any] = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True, **sampling}
    return inference_pb2.GenerateRequest(
        request_id=request_id,
        token_ids=inference_pb2.TokenIds(ids=token_ids),
        sampling=inference_pb2.SamplingParams(**values),
    )


def held_of(router: Routed) -> KVEventIndex:
    held = router.router.fleet.held
    assert held is not None
    return held


async def heard(router: Routed, *servers: Harness) -> None:
    held = held_of(router)
    await eventually(lambda: all(held.is_heard(one.target) for one in servers))


async def until_holding(router: Routed, one: Harness, num_blocks: int) -> None:
    held = held_of(router)
    await eventually(lambda: held.num_blocks(one.target) == num_blocks)


async def went_to(router: Routed, message: inference_pb2.GenerateRequest, **call: Any) -> str:
    """The server that a call went to."""
    before = router.router.counts.begun.copy()
    assert await collect(router.inference.Generate(message, **call))
    (name,) = router.router.counts.begun - before
    return name


async def test_a_prompt_follows_what_servers_hold_and_not_what_they_were_sent(tmp_path: Path) -> None:
    with ExitStack() as stack:
        tells = [stack.enter_context(Closing(telling(tmp_path, name))) for name in "ab"]
        async with (
            server(**events_at(tmp_path, "a")) as a,
            server(**events_at(tmp_path, "b")) as b,
            routed(a.target, b.target) as router,
        ):
            await heard(router, a, b)
            for holder, tell in ((a, tells[0]), (b, tells[1]), (a, tells[0])):
                tell.publish(stored(PROMPT))
                await until_holding(router, holder, len(PROMPT) // SIZE)
                assert {await went_to(router, ask(PROMPT)) for _ in range(4)} == {holder.target}
                assert await went_to(router, ask([*PROMPT[:32], *OTHER])) == holder.target
                tell.publish(removed(PROMPT))  # though all of them were sent there
                await until_holding(router, holder, 0)
            assert router.router.fleet.directory.num_hits == 15


async def test_the_longest_that_is_held_wins_and_of_equals_the_least_busy(tmp_path: Path) -> None:
    with ExitStack() as stack:
        tells = [stack.enter_context(Closing(telling(tmp_path, name))) for name in "ab"]
        async with (
            server(**events_at(tmp_path, "a")) as a,
            server(**events_at(tmp_path, "b")) as b,
            routed(a.target, b.target) as router,
        ):
            await heard(router, a, b)
            tells[0].publish(stored(PROMPT[:32]))
            tells[1].publish(stored(PROMPT[:48]))
            await until_holding(router, a, 8)
            await until_holding(router, b, 12)
            assert await went_to(router, ask(PROMPT)) == b.target
            tells[0].publish(stored(PROMPT[:48]))
            await until_holding(router, a, 12)
            for one in (a, b):
                one.faults.gate.clear()
            first = asyncio.ensure_future(collect(router.inference.Generate(ask(PROMPT[:52], max_tokens=40))))
            await eventually(lambda: a.num_open_calls + b.num_open_calls == 1)
            free = b if a.num_open_calls else a
            second = asyncio.ensure_future(collect(router.inference.Generate(ask([*PROMPT[:48], *OTHER[:8]]))))
            await eventually(lambda: free.num_open_calls == 1)
            for one in (a, b):
                one.faults.release()
            await asyncio.gather(first, second)


async def test_a_prompt_that_is_being_computed_is_not_computed_elsewhere_too(tmp_path: Path) -> None:
    """The call that brings a beginning counts until it has ended; then only what is told."""
    with ExitStack() as stack:
        for name in "ab":
            stack.enter_context(Closing(telling(tmp_path, name)))
        async with (
            server(**events_at(tmp_path, "a")) as a,
            server(**events_at(tmp_path, "b")) as b,
            routed(a.target, b.target) as router,
        ):
            await heard(router, a, b)
            for one in (a, b):
                one.faults.gate.clear()
            first = asyncio.ensure_future(collect(router.inference.Generate(ask(PROMPT, max_tokens=30))))
            await eventually(lambda: a.num_open_calls + b.num_open_calls == 1)
            mine, other = (a, b) if a.num_open_calls else (b, a)
            again = asyncio.ensure_future(
                collect(router.inference.Generate(ask([*PROMPT, *OTHER[:16]], max_tokens=30)))
            )
            await eventually(lambda: mine.num_open_calls == 2)
            assert other.num_open_calls == 0
            for one in (a, b):
                one.faults.release()
            await asyncio.gather(first, again)
            hits = router.router.fleet.directory.num_hits
            await went_to(router, ask(PROMPT))
            assert router.router.fleet.directory.num_hits == hits == 1, "nobody tells that it holds anything"


async def test_texts_go_by_what_was_sent_and_so_does_everything_where_nobody_is_heard(tmp_path: Path) -> None:
    tell = telling(tmp_path, "a")
    async with (
        server(**events_at(tmp_path, "a")) as a,
        server(**events_at(tmp_path, "b")) as b,  # says that it tells, and does not
        routed(a.target, b.target) as router,
    ):
        await heard(router, a)
        assert held_of(router).is_heard(b.target) is False
        text = inference_pb2.GenerateRequest(text="the same beginning " * 3, sampling=ask(PROMPT).sampling)
        assert len({await went_to(router, text) for _ in range(4)}) == 1
        tell.publish(stored(PROMPT))
        await until_holding(router, a, 16)
        assert await went_to(router, ask(PROMPT)) == a.target
        await asyncio.to_thread(tell.close)
        await eventually(lambda: not held_of(router).is_heard(a.target) and not held_of(router).num_blocks(a.target))
        assert {await went_to(router, ask(PROMPT)) for _ in range(3)} == {a.target}, "it was sent there"
        with Closing(telling(tmp_path, "a")) as again:
            await heard(router, a)
            again.publish(stored(OTHER))
            await until_holding(router, a, 16)
            assert {await went_to(router, ask(OTHER)) for _ in range(3)} == {a.target}


async def test_replicas_tell_by_themselves_and_late_routers_hear_what_was_told(tmp_path: Path) -> None:
    with ExitStack() as stack:
        ranks = [stack.enter_context(Closing(telling(tmp_path, "a", rank))) for rank in range(2)]
        b_tells = stack.enter_context(Closing(telling(tmp_path, "b")))
        ranks[0].publish(stored(PROMPT[:32]))
        ranks[1].publish(stored(OTHER))
        b_tells.publish(stored(PROMPT[:16]))
        async with (
            server(**events_at(tmp_path, "a", data_parallel_size=2)) as a,
            server(**events_at(tmp_path, "b")) as b,
            routed(a.target, b.target) as router,
        ):
            await until_holding(router, a, 8 + 16)
            await until_holding(router, b, 4)
            await heard(router, a, b)
            assert {await went_to(router, ask(prompt)) for prompt in (PROMPT, OTHER)} == {a.target}
            info = await router.control.GetServerInfo(_INFO)
            told = {option.name: option.value for option in info.options}
            assert told[f"kv-events {a.target}"] == "24 blocks"
            ranks[1].close()
            await eventually(lambda: not held_of(router).is_heard(a.target))
            info = await router.control.GetServerInfo(_INFO)
            told = {option.name: option.value for option in info.options}
            assert told[f"kv-events {a.target}"] == "not connected"


async def test_who_is_not_named_any_more_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "targets"
    with ExitStack() as stack:
        tells = [stack.enter_context(Closing(telling(tmp_path, name))) for name in "ab"]
        for tell in tells:
            tell.publish(stored(PROMPT))
        async with server() as a, server() as b:
            lines = [
                f"{one.target},kv-events=ipc://{tmp_path}/{name},kv-events-replay=ipc://{tmp_path}/{name}r"
                for one, name in ((a, "a"), (b, "b"))
            ]
            path.write_text("\n".join(lines))
            async with routed(wait_for=2, targets_file=str(path)) as router:
                await until_holding(router, a, 16)
                await until_holding(router, b, 16)
                path.write_text(lines[1])
                await eventually(lambda: held_of(router).is_heard(a.target) is None)
                assert held_of(router).num_blocks(a.target) == 0
                tells[0].publish(stored(OTHER))
                assert await went_to(router, ask(PROMPT)) == b.target
                path.write_text(f"{lines[1]}\n{a.target},kv-events=none")
                await router.until(2)
                assert held_of(router).is_heard(a.target) is None
    await eventually(lambda: not any("kv-subscriber" in thread.name for thread in threading.enumerate()))


async def test_tenants_adapters_and_salts_hold_by_themselves(tmp_path: Path) -> None:
    team = PrefixOwner("salt", "team")
    with ExitStack() as stack:
        tells = [stack.enter_context(Closing(telling(tmp_path, name))) for name in "ab"]
        async with (
            server(**events_at(tmp_path, "a", isolate_tenants=True)) as a,
            server(**events_at(tmp_path, "b", isolate_tenants=True)) as b,
            routed(a.target, b.target) as router,
        ):
            await heard(router, a, b)
            tells[0].publish(stored(PROMPT, team))
            tells[1].publish(stored(PROMPT, PrefixOwner("salt", "others")))
            await until_holding(router, a, 16)
            await until_holding(router, b, 16)
            salted = ask(PROMPT, cache_salt="salt")
            for tenant, holder in (("team", a), ("others", b), ("team", a)):
                metadata = (("x-jpaged-tenant", tenant),)
                assert await went_to(router, salted, metadata=metadata) == holder.target
            hits = router.router.fleet.directory.num_hits
            await went_to(router, ask(PROMPT), metadata=(("x-jpaged-tenant", "team"),))
            await went_to(router, salted, metadata=(("x-jpaged-tenant", "nobody"),))
            assert router.router.fleet.directory.num_hits == hits == 3


@pytest.mark.parametrize(
    ("isolates", "checks", "has_key", "num_tokens"),
    [
        (True, True, False, 64),
        (True, True, True, None),  # whose it is, the server knows alone
        (True, False, True, 64),
        (False, True, True, 64),
    ],
)
def test_a_tenant_that_only_the_server_knows_is_not_guessed(
    tmp_path: Path, isolates: bool, checks: bool, has_key: bool, num_tokens: int | None
) -> None:
    with Closing(telling(tmp_path, "a")) as tell:
        tell.publish(stored(PROMPT, PrefixOwner("", "team" if isolates else "")))
        held = KVEventIndex()
        held.listen("a", KVEventEndpoints(((f"ipc://{tmp_path}/a", f"ipc://{tmp_path}/ar"),), isolates, checks))
        wait(lambda: bool(held.is_heard("a")))
        prompt = parse_prompt_prefix(ask(PROMPT), b"", "team", has_unread_key=has_key)
        assert prompt is not None
        assert held.num_tokens(prompt).get("a") == num_tokens
        held.end()


def test_long_events_are_taken_in_pieces_and_nothing_after_a_server_was_forgotten(tmp_path: Path) -> None:
    prompt = [i % 250 for i in range(8000)]
    beginning = parse_prompt_prefix(ask(prompt), b"")
    assert beginning is not None
    held = KVEventIndex()
    with Closing(telling(tmp_path, "a")) as tell:
        tell.publish(stored(prompt))
        held.listen("a", KVEventEndpoints(((f"ipc://{tmp_path}/a", f"ipc://{tmp_path}/ar"),), False, False))
        wait(lambda: held.num_tokens(beginning) == {"a": 8000})
        (key,) = held._keys
        tell.publish(removed(prompt[:4000]))
        wait(lambda: held.num_tokens(beginning) == {"a": 0} and held.num_blocks("a") == 1000)
        held.close(held.forget("a"))
        held.take(key, ())
        assert held.num_tokens(beginning) == {} and not held._directory.servers
    held.end()


def test_a_router_of_load_alone_listens_to_nobody() -> None:
    router = Router(RouteOptions(("a:1",), max_known_prefixes=0), EngineConfig.load({}).server, AccessOptions())
    assert router.fleet.held is None


class Closing:
    """A publisher that is closed at the end."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    def __enter__(self) -> Publisher:
        return self._publisher

    def __exit__(self, *_: object) -> None:
        self._publisher.close()


def wait(condition: Callable[[], bool]) -> None:
    asyncio.run(eventually(condition))
