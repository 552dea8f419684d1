"""Where servers tell which prefixes they hold: by what they say of themselves, or what their target says."""

import pytest

from jpaged._proto.v1 import control_pb2
from jpaged.errors import InvalidArgument, Unavailable
from jpaged.route.kv_event_index import resolve_kv_event_endpoints
from jpaged.route.targets import Address, BackendTargets, parse_target


def info(**options: str) -> control_pb2.GetServerInfoResponse:
    told = control_pb2.GetServerInfoResponse()
    for name, value in options.items():
        told.options.add(name=name.replace("_", "-"), value=value)
    return told


@pytest.mark.parametrize(
    ("target", "bound", "reached"),
    [
        ("10.0.0.7:50051", "tcp://*:5557", "tcp://10.0.0.7:5557"),
        ("10.0.0.7:50051", "tcp://0.0.0.0:5557", "tcp://10.0.0.7:5557"),
        ("[fd00::7]:50051", "tcp://[::]:5557", "tcp://[fd00::7]:5557"),
        ("ipv4:10.0.0.7:50051", "tcp://*:5557", "tcp://10.0.0.7:5557"),
        ("server-7:50051", "tcp://eth0:5557", "tcp://server-7:5557"),
        ("server-7:50051", "tcp://10.1.0.7:5557", "tcp://10.1.0.7:5557"),
        ("localhost:50051", "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5557"),
        ("127.0.0.1:50051", "ipc:///run/kv", "ipc:///run/kv"),
        ("unix:/run/jpaged", "tcp://*:5557", "tcp://127.0.0.1:5557"),
    ],
)
def test_what_a_server_is_bound_to_is_reached_at_its_host(target: str, bound: str, reached: str) -> None:
    telling = resolve_kv_event_endpoints(Address(target), info(kv_events_endpoint=bound))
    assert telling is not None
    assert telling.sockets == ((reached, None),)


@pytest.mark.parametrize("bound", ["tcp://127.0.0.1:5557", "tcp://[::1]:5557", "ipc:///run/kv"])
def test_what_only_its_own_machine_reaches_is_said_so(bound: str) -> None:
    with pytest.raises(Unavailable, match="own machine"):
        resolve_kv_event_endpoints(Address("10.0.0.7:50051"), info(kv_events_endpoint=bound))


def test_each_replica_has_addresses_of_its_own() -> None:
    said = {
        "kv_events_endpoint": "tcp://*:5557",
        "kv_events_replay_endpoint": "tcp://*:5657",
        "data_parallel_size": "3",
    }
    telling = resolve_kv_event_endpoints(Address("a:1"), info(**said, isolate_tenants="True", api_keys="/keys"))
    assert telling is not None
    assert telling.sockets == tuple((f"tcp://a:{5557 + i}", f"tcp://a:{5657 + i}") for i in range(3))
    assert telling.isolates_tenants and telling.checks_keys


def test_a_target_says_more_than_its_server() -> None:
    said = info(kv_events_endpoint="tcp://*:5557", kv_events_replay_endpoint="tcp://*:5558", data_parallel_size="2")
    assert resolve_kv_event_endpoints(parse_target("target", "a:1,kv-events=none"), said) is None
    named = resolve_kv_event_endpoints(parse_target("target", "a:1,kv-events=tcp://b:1000"), said)
    assert named is not None
    assert named.sockets == (("tcp://b:1000", None), ("tcp://b:1001", None))
    both = resolve_kv_event_endpoints(
        parse_target("target", "a:1,kv-events=tcp://*:1000,kv-events-replay=tcp://*:2000"), info()
    )
    assert both is not None
    assert both.sockets == (("tcp://a:1000", "tcp://a:2000"),)
    assert resolve_kv_event_endpoints(Address("a:1"), info()) is None


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("a:1,kv-events=5557", "neither tcp://HOST:PORT nor ipc://PATH"),
        ("a:1,kv-events=tcp://*:0", "neither tcp://HOST:PORT"),
        ("a:1,kv-events=tcp://*:99999", "neither tcp://HOST:PORT"),
        ("a:1,kv-events", "neither kv-events="),
        ("a:1,kv-events=none,kv-events=none", "once each"),
        ("a:1,kv-events-topic=x", "neither kv-events="),
        ("a:1,kv-events-replay=tcp://*:1", "requires kv-events="),
        ("a:1,kv-events=none,kv-events-replay=tcp://*:1", "requires kv-events="),
        ("a:1,kv-events=tcp://*:1,kv-events-replay=none", "neither tcp://HOST:PORT"),
        ("a:1,other=1", "is not HOST:PORT"),
    ],
)
def test_a_target_that_names_no_endpoint_is_refused(target: str, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        BackendTargets([target], None)


async def test_all_addresses_of_a_name_tell_as_its_target_says() -> None:
    targets = BackendTargets(["dns:///localhost:1234,kv-events=tcp://*:5557", "127.0.0.1:9"], None)
    first, second = await targets.now()
    assert (first.target, first.name, first.events) == ("127.0.0.1:1234", "localhost", "tcp://*:5557")
    assert (second.target, second.events) == ("127.0.0.1:9", None)
    telling = resolve_kv_event_endpoints(first, info())
    assert telling is not None
    assert telling.sockets == (("tcp://127.0.0.1:5557", None),)


@pytest.mark.parametrize("number", ["", "0", "-1", "x", "257", "1000000000"])
def test_a_number_of_replicas_that_no_server_has_is_not_believed(number: str) -> None:
    said = info(kv_events_endpoint="tcp://*:5557", data_parallel_size=number)
    with pytest.raises(Unavailable, match="data-parallel-size"):
        resolve_kv_event_endpoints(Address("a:1"), said)
