"""A prefill server and a decode server: the same tokens as one server, whatever is asked and whatever fails."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from jpaged._proto.v1 import control_pb2, inference_pb2
from jpaged.config import EngineConfig
from jpaged.errors import InvalidArgument
from jpaged.server.lifecycle import Server
from jpaged.server_load import RoleLoad
from jpaged.service import kv_protocol, roles
from jpaged.testing import FakeExecutor, expected_tokens
from tests.server.harness import Harness, collect, error_details, eventually, failure_of, make_serving, request, running

BLOCK_BYTES = 4 * 16
LONG = "Once upon a time there was a server that computed prompts for others."


def fake(kind: type[FakeExecutor] = FakeExecutor, *, num_host_blocks: int = 128) -> FakeExecutor:
    return kind(num_blocks=256, num_host_blocks=num_host_blocks, max_model_len=256)


def apart(target: str, **options: Any) -> dict[str, Any]:
    """The options of a decode server whose prompts of 8 tokens and more are computed there."""
    return {
        "role": "decode",
        "prefill_target": (target,),
        "prefill_min_tokens": 8,
        "prefill_policy": "always",
        **options,
    }


@dataclass
class Pair:
    """A server that prefills and one that decodes."""

    prefill: Harness
    decode: Harness

    @property
    def sent(self) -> RoleLoad:
        return self.prefill.serving.role_counts.load()

    @property
    def received(self) -> RoleLoad:
        return self.decode.serving.role_counts.load()

    @property
    def failures(self) -> Mapping[str, int]:
        return self.decode.serving.role_counts.num_failed

    @property
    def here(self) -> Mapping[str, int]:
        return self.decode.serving.role_counts.num_here

    async def generate(self, message: inference_pb2.GenerateRequest, **rest: Any) -> list[Any]:
        return await collect(self.decode.inference.Generate(message, **rest))

    async def at_rest(self) -> None:
        """Waits until nothing is in flight, and checks that every block came back."""
        for one in (self.prefill, self.decode):
            await eventually(functools.partial(_is_at_rest, one))
            one.serving.engine.check()


@asynccontextmanager
async def pair(
    *,
    executors: tuple[FakeExecutor, FakeExecutor] | None = None,
    prefill: Mapping[str, Any] | None = None,
    decode: Mapping[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[Pair]:
    """Both servers, which compute prompts of 8 tokens and more apart; `options` are of both."""
    first, second = executors or (fake(), fake())
    async with (
        running(executor=first, role="prefill", **{**options, **(prefill or {})}) as one,
        running(executor=second, **apart(one.target, **options, **(decode or {}))) as other,
    ):
        both = Pair(one, other)
        yield both
        await both.at_rest()


async def alone(message: inference_pb2.GenerateRequest, **options: Any) -> list[Any]:
    """What one server tells that does both."""
    async with running(executor=fake(), **options) as harness:
        return await collect(harness.inference.Generate(message))


def folded(messages: list[Any]) -> dict[int, Any]:
    """What was told of each sequence, however it was cut into messages."""
    found: dict[int, Any] = {}
    for one in messages:
        ids, text, logprobs, ends = found.setdefault(one.index, ([], [], [], []))
        ids += one.token_ids
        text.append(one.text)
        logprobs += [position.SerializeToString() for position in one.logprobs]
        if one.HasField("finish"):
            one.finish.ClearField("weight_versions")  # of the tokens that were sampled there
            ends.append(one.finish.SerializeToString())
    return {index: (ids, "".join(text), logprobs, ends) for index, (ids, text, logprobs, ends) in found.items()}


CASES = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 3},
    "several": {"temperature": 1.0, "seed": 3, "n": 3},
    "logprobs": {"logprobs": 2},
    "several with logprobs": {"n": 2, "temperature": 0.7, "seed": 5, "logprobs": 0},
    "named logprobs": {"temperature": 0.7, "seed": 5, "logprob_token_ids": [7, 9]},
    "penalties": {"temperature": 1.0, "seed": 4, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    "repetition": {"temperature": 1.0, "seed": 4, "repetition_penalty": 1.4},
    "biases": {"logit_bias": {65: 30.0}, "temperature": 1.0, "seed": 1},
    "salt": {"cache_salt": "salt"},
    "least tokens": {"min_tokens": 5, "ignore_eos": False, "temperature": 1.0, "seed": 11},
    "one token": {"max_tokens": 1},
    "two tokens": {"max_tokens": 2},
}


@pytest.mark.thinned(5)
@pytest.mark.parametrize("sampling", CASES.values(), ids=CASES)
async def test_tokens_are_those_of_one_server(sampling: dict[str, Any]) -> None:
    message = request(LONG, **{"max_tokens": 24, **sampling})
    async with pair() as both:
        told = await both.generate(message)
        assert folded(told) == folded(await alone(message))
        assert [one.is_last for one in told] == [False] * (len(told) - 1) + [True]
        assert told[-1].usage == (await alone(message))[-1].usage
        times = told[-1].times
        assert 0.0 < times.arrival_s <= times.first_scheduled_s <= times.first_token_s <= times.last_token_s
        assert told[0].seed == message.sampling.seed or not message.sampling.HasField("seed")
        assert both.received.num_asked == both.sent.num_prefills_for_others == 1
        wanted = 0 if sampling.get("max_tokens") == 1 else len(LONG) // 4
        assert both.received.num_blocks_received == wanted
        assert both.received.num_bytes_received == wanted * BLOCK_BYTES
        assert not both.failures


async def test_what_has_come_is_not_computed_again() -> None:
    async with pair() as both:
        await both.generate(request(LONG))
        load = both.decode.serving.engine.load()
        assert load.num_prefix_hit_tokens == len(LONG) // 4 * 4
        assert load.num_blocks_swapped_in == len(LONG) // 4
        # A prompt that goes on from it is asked for, and only what is new comes.
        await both.generate(request(LONG + " And it was good at it."))
        assert both.received.num_blocks_received == (len(LONG) + 23) // 4
        # What is there already is not asked for.
        await both.generate(request(LONG))
        assert (both.received.num_asked, both.here["cached"]) == (2, 1)


RULED = {
    "short": request("hello"),
    "uncached": request(LONG, use_prefix_cache=False),
    "ranked": request(LONG, beam_width=2),
    "told_of": request(LONG, prompt_logprobs=1),
}


@pytest.mark.parametrize("reason", RULED)
async def test_what_does_not_travel_is_computed_where_it_was_asked(reason: str) -> None:
    async with pair() as both:
        told = await both.generate(RULED[reason])
        assert folded(told) == folded(await alone(RULED[reason]))
        assert (both.here[reason], both.received.num_asked) == (1, 0)


async def test_a_first_token_that_ends_its_sequence_is_the_last() -> None:
    (first,) = expected_tokens(list(LONG.encode()), 1)
    message = request(LONG, stop_token_ids=[first])
    async with pair() as both:
        (told,) = await both.generate(message)
        assert told.is_last
        assert folded([told]) == folded(await alone(message))
        assert told.finish.matched_stop_token_id == first


async def test_a_whole_answer_is_told_at_the_end() -> None:
    message = request(LONG, n=2, temperature=1.0, seed=7)
    message.whole = True
    async with pair() as both:
        told = await both.generate(message)
        assert len(told) == 2
        assert folded(told) == folded(await alone(message))


async def test_tenants_share_nothing_on_either_server() -> None:
    async with pair() as both:
        for number, tenant in enumerate(("acme", "other", "acme"), start=1):
            told = await both.generate(request(LONG), metadata=(("x-jpaged-tenant", tenant),))
            assert folded(told) == folded(await alone(request(LONG)))
            assert both.received.num_asked == min(number, 2)
        assert both.prefill.serving.engine.load().num_prefix_hit_tokens == 0


# --- what fails -------------------------------------------------------------------------------------------------------


async def test_without_a_prefill_server_the_prompt_is_computed_here() -> None:
    async with pair() as both:
        await both.prefill.channel.close()
        both.prefill.server.request_stop()
        await both.prefill.run
        for number in (1, 2):
            told = await both.generate(request(f"{number} {LONG}"))
            assert folded(told) == folded(await alone(request(f"{number} {LONG}")))
            assert both.failures["prefill"] == number
        assert both.received.num_blocks_received == 0


async def test_another_prefill_server_takes_what_one_refuses() -> None:
    async with (
        running(executor=fake(), role="prefill") as gone,
        running(executor=fake(), role="prefill") as there,
    ):
        gone.server.request_stop()
        await gone.run
        options = apart(gone.target, prefill_target=(gone.target, there.target))
        async with running(executor=fake(), **options) as decode:
            for number in range(3):
                await collect(decode.inference.Generate(request(f"{number} {LONG}")))
            assert not decode.serving.role_counts.num_failed
            assert there.serving.role_counts.load().num_prefills_for_others == 3


async def test_a_server_of_another_model_is_not_believed() -> None:
    class Other(FakeExecutor):
        """Its blocks mean something else."""

    async with pair(executors=(fake(Other), fake())) as both:
        told = await both.generate(request(LONG))
        assert folded(told) == folded(await alone(request(LONG)))
        assert (both.failures["prefill"], both.sent.num_prefills_for_others) == (1, 0)


async def test_a_block_that_is_torn_on_its_way_is_computed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = kv_protocol.cut

    def torn(*of: Any) -> Any:
        (first, *rest), *others = cut(*of)
        bad = first.contents[:-1] + bytes([first.contents[-1] ^ 1])
        return [[dataclasses.replace(first, contents=bad), *rest], *others]

    monkeypatch.setattr(roles, "cut", torn)
    async with pair() as both:
        told = await both.generate(request(LONG))
        assert folded(told) == folded(await alone(request(LONG)))
        assert both.failures == {"transfer": 1}


async def test_a_block_under_a_key_that_nobody_asked_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = kv_protocol.cut

    def stale(*of: Any) -> Any:
        return [[dataclasses.replace(piece, key=bytes(32)) for piece in pieces] for pieces in cut(*of)]

    monkeypatch.setattr(roles, "cut", stale)
    async with pair() as both:
        told = await both.generate(request(LONG))
        assert folded(told) == folded(await alone(request(LONG)))
        assert both.failures == {"transfer": 1}
        assert both.decode.serving.engine.load().num_blocks_swapped_in == 0


async def test_without_room_in_the_host_the_rest_is_computed() -> None:
    async with pair(executors=(fake(), fake(num_host_blocks=5))) as both:
        told = await both.generate(request(LONG))
        assert folded(told) == folded(await alone(request(LONG)))
        assert both.received.num_blocks_without_room == len(LONG) // 4 - 5
        assert both.decode.serving.engine.load().num_blocks_swapped_in == 5


async def test_without_room_in_the_hosts_memory_of_the_prefill_server_fewer_blocks_come() -> None:
    async with pair(executors=(fake(num_host_blocks=5), fake())) as both:
        told = await both.generate(request(LONG))
        assert folded(told) == folded(await alone(request(LONG)))
        assert both.received.num_blocks_received + both.received.num_blocks_missing == len(LONG) // 4


async def test_a_prefill_server_that_takes_too_long_is_given_up() -> None:
    async with pair(decode={"prefill_timeout": 0.05}) as both:
        both.prefill.faults.hold_after(0)
        told = await both.generate(request(LONG))
        assert folded(told) == folded(await alone(request(LONG)))
        assert both.failures == {"prefill": 1}
        both.prefill.faults.release()


async def test_a_deadline_holds_while_others_compute() -> None:
    async with pair() as both:
        both.prefill.faults.hold_after(0)
        error = await failure_of(both.decode.inference.Generate(request(LONG), timeout=0.2))
        assert error.code().name == "DEADLINE_EXCEEDED"
        both.prefill.faults.release()


async def test_a_caller_that_goes_away_takes_the_prompt_with_it() -> None:
    async with pair() as both:
        both.prefill.faults.hold_after(0)
        call = both.decode.inference.Generate(request(LONG))
        await eventually(lambda: both.prefill.num_open_calls == 1)
        call.cancel()
        await eventually(lambda: both.prefill.num_open_calls == 0)
        both.prefill.faults.release()


async def test_a_request_can_be_aborted_while_others_compute() -> None:
    async with pair() as both:
        both.prefill.faults.hold_after(0)
        call = both.decode.inference.Generate(request(LONG, request_id="mine"))
        await eventually(lambda: both.prefill.num_open_calls == 1)
        await both.decode.control.Abort(control_pb2.AbortRequest(request_id="mine"))
        (told,) = await collect(call)
        assert told.finish.reason == inference_pb2.FINISH_REASON_ABORT
        both.prefill.faults.release()


async def test_a_request_has_its_place_while_others_compute() -> None:
    """One runs, one waits: a third is refused, although neither is the engine's yet."""
    async with pair(decode={"max_num_seqs": 1, "max_num_queued_reqs": 1}) as both:
        both.prefill.faults.hold_after(0)
        calls = [both.decode.inference.Generate(request(f"{number}: {LONG}")) for number in range(2)]
        await eventually(lambda: both.decode.num_open_calls == 2)
        await eventually(lambda: both.prefill.num_open_calls == 2)
        error = await failure_of(both.decode.inference.Generate(request(LONG)))
        assert error_details(error)["ErrorInfo"].reason == "QUEUE_FULL"
        both.prefill.faults.release()
        for number, call in enumerate(calls):
            assert folded(await collect(call)) == folded(await alone(request(f"{number}: {LONG}")))


async def test_a_drain_waits_for_what_others_compute() -> None:
    async with pair() as both:
        both.prefill.faults.hold_after(0)
        call = both.decode.inference.Generate(request(LONG))
        await eventually(lambda: both.prefill.num_open_calls == 1)
        both.decode.server.drain()
        await eventually(lambda: both.decode.server.state.stage.name == "DRAINING")
        both.prefill.faults.release()
        assert folded(await collect(call)) == folded(await alone(request(LONG)))


@pytest.mark.long
async def test_replicas_of_either_role_are_one_server() -> None:
    """Blocks leave the pool that computed them, and come to that where their request has its place."""
    async with pair(prefill={"others": [fake()]}, decode={"others": [fake()]}) as both:
        messages = [request(f"{number} {LONG}", temperature=1.0, seed=number, max_tokens=12) for number in range(8)]
        both.prefill.faults.hold_after(0)  # so that each replica has one at least
        calls = [asyncio.create_task(both.generate(message)) for message in messages]
        await eventually(lambda: bool(both.prefill.serving.engine.replica_loads()[1].num_prompt_tokens))
        both.prefill.faults.release()
        told = await asyncio.gather(*calls)
        async with running(executor=fake()) as one:
            for message, came in zip(messages, told, strict=True):
                assert folded(came) == folded(await collect(one.inference.Generate(message)))
        assert not both.failures
        assert both.received.num_blocks_received == 8 * ((len(LONG) + 2) // 4)
        for harness in (both.prefill, both.decode):
            assert all(load.num_prompt_tokens for load in harness.serving.engine.replica_loads())
        decode = both.decode.serving.engine
        assert decode.load().num_blocks_swapped_in == both.received.num_blocks_received


async def test_of_several_replicas_a_place_is_kept_at_one() -> None:
    async with pair(decode={"others": [fake()], "max_num_seqs": 1, "max_num_queued_reqs": 1}) as both:
        both.prefill.faults.hold_after(0)
        calls = [both.decode.inference.Generate(request(f"{number}: {LONG}")) for number in range(4)]
        await eventually(lambda: both.prefill.num_open_calls == 4)
        error = await failure_of(both.decode.inference.Generate(request(LONG)))
        assert error_details(error)["ErrorInfo"].reason == "QUEUE_FULL"
        calls[0].cancel()
        await eventually(lambda: both.decode.num_open_calls == both.prefill.num_open_calls == 3)
        calls[0] = both.decode.inference.Generate(request(f"0: {LONG}"))
        await eventually(lambda: both.prefill.num_open_calls == 4)
        both.prefill.faults.release()
        for number, call in enumerate(calls):
            assert folded(await collect(call)) == folded(await alone(request(f"{number}: {LONG}")))


# --- the role prefill -------------------------------------------------------------------------------------------------


async def test_a_prefill_server_refuses_to_generate() -> None:
    async with running(executor=fake(), role="prefill") as harness:
        error = await failure_of(harness.inference.Generate(request("hello")))
        violation = error_details(error)["BadRequest"].field_violations[0]
        assert violation.field == "sampling.max_tokens"
        assert violation.description.startswith("8 is over the limit of 1: this server only computes prompts")
        (told,) = await collect(harness.inference.Generate(request("hello", max_tokens=1)))
        assert list(told.token_ids) == expected_tokens(list(b"hello"), 1)
        info = await harness.control.GetServerInfo(control_pb2.GetServerInfoRequest())
        assert info.role == "prefill"


async def test_who_computes_prompts_for_others_is_told_in_metrics() -> None:
    async with pair(metrics_port=0) as both:
        await both.generate(request(LONG))
        await both.generate(request("hello"))
        for harness, lines in (
            (
                both.decode,
                ["jpaged:prefills_asked_total", 'jpaged:prefills_here_total{model_name="fake",reason="short"}'],
            ),
            (both.prefill, ["jpaged:prefills_for_others_total", "jpaged:blocks_sent_total"]),
        ):
            text = await _metrics(harness)
            assert all(line in text for line in lines)


@pytest.mark.long
async def test_many_at_once_are_all_their_own() -> None:
    async with pair() as both:
        messages = [request(f"{number} {LONG}", temperature=1.0, seed=number, max_tokens=12) for number in range(16)]
        told = await asyncio.gather(*(both.generate(message) for message in messages))
        async with running(executor=fake()) as one:
            for message, came in zip(messages, told, strict=True):
                assert folded(came) == folded(await collect(one.inference.Generate(message)))
        assert not both.failures


def _is_at_rest(harness: Harness) -> bool:
    return harness.num_open_calls == 0 and harness.num_blocks_used == 0


async def _metrics(harness: Harness) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", harness.server.metrics_port)
    writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    return text


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no target": ({"role": "decode"}, "prefill_target: is missing: the role decode requires at least one"),
    "twice": ({"role": "decode", "prefill_target": ("a:1", "a:1")}, "prefill_target: a:1, a:1 has a duplicate"),
    "not decode": (
        {"prefill_target": ("a:1",)},
        "prefill_target: requires the role decode; the role of this server is both",
    ),
    "no cache": (
        {"role": "prefill", "enable_prefix_caching": False},
        "role: prefill transfers blocks of the prefix cache; enable_prefix_caching is False, kv_policy paged",
    ),
    "reserved": (
        {"role": "prefill", "kv_policy": "reserve-max"},
        "role: prefill transfers blocks of the prefix cache; enable_prefix_caching is True, kv_policy reserve-max",
    ),
    "no host memory": (
        {"role": "prefill", "swap_space": 0.0},
        "role: prefill transfers blocks of the prefix cache through host memory; swap_space is 0",
    ),
    "half of a certificate": (
        {"role": "decode", "prefill_target": ("a:1",), "prefill_tls_cert": "x"},
        "prefill_tls_key: is missing: give both prefill_tls_cert and prefill_tls_key",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_options_that_do_not_go_together_are_refused_at_start(case: str) -> None:
    options, problem = REFUSED[case]
    with pytest.raises(InvalidArgument) as refused:
        Server(EngineConfig.load(options), lambda progress: make_serving(fake(), EngineConfig.load(options)))
    assert str(refused.value) == problem


async def test_a_pool_without_blocks_of_the_host_is_refused_when_it_is_there() -> None:
    config = EngineConfig.load({"port": 0, "role": "prefill"})
    server = Server(config, lambda progress: make_serving(fake(num_host_blocks=0), config))
    await server.start()
    assert await server.run() == 1
    assert str(server.state.failure) == (
        "role: prefill transfers blocks of the prefix cache: prefixes cannot be transferred: "
        "no host memory is configured for the transfer (swap_space)"
    )


class Rereading(FakeExecutor):
    """A fake whose files have other weights at the next wake-up."""

    weight_in_files = 0

    def wake_up(self, tag: Any) -> None:
        super().wake_up(tag)
        if tag == "weights":
            self._weights += self.weight_in_files - self.base_weight
            self.base_weight = self.weight_in_files
            self._identity_changed()


async def reread(harness: Harness, weight: int = 0) -> None:
    """Lets a server read its weights again."""
    executor = harness.executor
    assert isinstance(executor, Rereading)
    executor.weight_in_files = weight
    engine = harness.serving.engine
    await asyncio.wrap_future(engine.sleep(2))
    assert await asyncio.wrap_future(engine.wake_up())


LONG_EACH = [pytest.param(who, marks=pytest.mark.long) for who in ("prefill", "decode")]


@pytest.mark.parametrize("who", [*LONG_EACH, "both"])
async def test_blocks_are_used_after_the_same_weights_were_read_again(who: str) -> None:
    async with pair(executors=(fake(Rereading), fake(Rereading)), enable_sleep_mode=True) as both:
        for one in (both.prefill, both.decode):
            if who in ("both", one.serving.config.roles.role):
                await reread(one)
        message = request(LONG, max_tokens=24)
        assert folded(await both.generate(message)) == folded(await alone(message))
        assert both.received.num_blocks_received == len(LONG) // 4
        assert both.decode.serving.engine.load().num_blocks_swapped_in == len(LONG) // 4
        assert not both.failures


@pytest.mark.parametrize("who", ["prefill", *LONG_EACH[1:], "both"])
async def test_no_token_of_other_weights_is_taken(who: str) -> None:
    """A server whose files have changed refuses, and is refused by, one that has the former weights."""
    weight = 5
    async with pair(executors=(fake(Rereading), fake(Rereading)), enable_sleep_mode=True) as both:
        message = request(LONG, max_tokens=8)
        await both.generate(message)
        for one in (both.prefill, both.decode):
            if who in ("both", one.serving.config.roles.role):
                await reread(one, weight)
        num_before = both.received.num_blocks_received
        told = await both.generate(request(f"2 {LONG}", max_tokens=8))
        prompt = [*f"2 {LONG}".encode()]
        wanted = expected_tokens(prompt, 8, weight=0 if who == "prefill" else weight)
        assert [token for one in told for token in one.token_ids] == wanted
        if who == "both":
            assert both.received.num_blocks_received > num_before
            assert not both.failures
        else:
            assert both.received.num_blocks_received == num_before
            assert both.failures == {"prefill": 1}
