"""The data port over JAX's transfer library: arrays between two ports, split and blocked in other ways."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import ipaddress
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from jpaged.config import DataPortOptions
from jpaged.device import block_port
from jpaged.device.block_port import JaxBlockPort
from jpaged.device.mesh import build_mesh, contents_spec
from jpaged.device.transfers import BlockPlace
from jpaged.engine.executor import ArrayPart, BlockArrays, BlockOffer
from jpaged.errors import Incompatible, InvalidArgument, Unavailable
from jpaged.kernels.kv_layout import KVLayout

OPTIONS = DataPortOptions("127.0.0.1:0", None, 1 << 20, 2.0)


def place_of(num_devices: int = 1, block_size: int = 4, dtype: str = "float32") -> BlockPlace:
    layout = KVLayout(3, 8, block_size, 4, 8, np.dtype(dtype), num_shards=num_devices)
    return BlockPlace(
        layout, jax.sharding.NamedSharding(build_mesh(jax.devices()[:num_devices]), contents_spec(layout))
    )


def blocks_at(place: BlockPlace, num_blocks: int, num_rows: int) -> tuple[np.ndarray, BlockArrays]:
    """Numbered contents of blocks, and the same on the devices of a place."""
    shape = (num_blocks, *place.layout.block_shape)
    contents = np.arange(np.prod(shape)).reshape(shape).astype(place.layout.storage_dtype)
    return contents, BlockArrays((jax.device_put(contents, place.sharding),), (num_rows,))


@pytest.fixture
def ports() -> Iterator[tuple[JaxBlockPort, JaxBlockPort]]:
    offering, pulling = (JaxBlockPort(OPTIONS, jax.devices()[0]) for _ in range(2))
    yield offering, pulling
    offering.close()
    settle(offering)
    pulling.close()


def settle(port: JaxBlockPort) -> None:
    until_s = time.monotonic() + 60
    while not port.is_settled and time.monotonic() < until_s:
        port.sweep()
    assert port.is_settled


def pulled(pull: Any) -> tuple[np.ndarray, tuple[tuple[int, int], ...]]:
    until_s = time.monotonic() + 60
    while not pull.is_done and time.monotonic() < until_s:
        time.sleep(0.001)
    contents, positions = pull.take()
    rows = [np.asarray(array)[:count] for array, count in zip(contents.arrays, contents.num_rows, strict=True)]
    return np.concatenate(rows), positions


def offered(port: JaxBlockPort, contents: BlockArrays, first: int = 0) -> BlockOffer:
    positions = tuple((first + index, 0) for index in range(sum(contents.num_rows)))
    return dataclasses.replace(port.offer(contents), positions=positions)


@pytest.mark.parametrize(("there", "here"), [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.thinned(3)
def test_blocks_arrive_however_they_are_split(
    ports: tuple[JaxBlockPort, JaxBlockPort], there: int, here: int, dtype: str
) -> None:
    offering, pulling = ports
    wanted, contents = blocks_at(place_of(there, dtype=dtype), 8, 5)
    offer = offered(offering, contents)
    assert len(offer.parts) == there
    place = place_of(here, dtype=dtype)
    pull = pulling.pull(offer, place)
    rows, positions = pulled(pull)
    np.testing.assert_array_equal(rows, wanted[:5])
    assert positions == offer.positions
    assert pull.take()[0].arrays[0].sharding == place.sharding
    assert offering.num_bytes_offered == wanted.nbytes
    offering.release(offer.uuid)
    assert offering.num_bytes_offered == 0


@pytest.mark.parametrize(("theirs", "ours", "first"), [(4, 8, 0), (8, 4, 0), (4, 8, 1), (4, 6, 0)])
@pytest.mark.thinned(3)
def test_blocks_arrive_in_another_size(
    ports: tuple[JaxBlockPort, JaxBlockPort], theirs: int, ours: int, first: int
) -> None:
    """Only blocks of which all tokens have come."""
    offering, pulling = ports
    wanted, contents = blocks_at(place_of(block_size=theirs), 8, 5)
    rows, positions = pulled(pulling.pull(offered(offering, contents, first), place_of(2, block_size=ours)))
    tokens = np.swapaxes(wanted[:5], 1, 2).reshape(5 * theirs, *wanted.shape[1:2], *wanted.shape[3:])
    begin, end = -(-first * theirs // ours), (first + 5) * theirs // ours
    assert positions == tuple((index, 0) for index in range(begin, end))
    for row, (index, _) in zip(rows, positions, strict=True):
        start = index * ours - first * theirs
        np.testing.assert_array_equal(np.swapaxes(row, 0, 1), tokens[start : start + ours])


def test_an_offer_that_is_not_pulled_is_freed_and_a_late_pull_fails(ports: tuple[JaxBlockPort, JaxBlockPort]) -> None:
    offering, pulling = ports
    place = place_of()
    _, contents = blocks_at(place, 8, 8)
    offer = offered(offering, contents)
    offering.withdraw(offer.uuid)
    settle(offering)
    assert offering.num_bytes_offered == 0
    with pytest.raises(Unavailable, match=r"the pull from .* failed"):
        pulled(pulling.pull(offer, place))
    rows, _ = pulled(pulling.pull(offered(offering, contents), place))  # on a new connection
    assert len(rows) == 8


def test_an_offer_that_was_pulled_can_be_withdrawn(
    ports: tuple[JaxBlockPort, JaxBlockPort], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_port, "_DRAIN_S", 0.0)
    offering, pulling = ports
    _, contents = blocks_at(place_of(), 8, 8)
    offer = offered(offering, contents)
    pulled(pulling.pull(offer, place_of()))
    offering.withdraw(offer.uuid)
    settle(offering)
    assert offering.num_bytes_offered == 0


def test_nothing_is_pulled_from_a_port_while_an_abandoned_pull_is_pending(
    ports: tuple[JaxBlockPort, JaxBlockPort],
) -> None:
    offering, pulling = ports
    place = place_of()
    _, contents = blocks_at(place, 8, 8)
    offer = offered(offering, contents)
    missing = dataclasses.replace(offer, uuid=offer.uuid ^ 1)
    pull = pulling.pull(missing, place)
    time.sleep(0.05)
    assert not pull.is_done
    pull.abandon()
    with pytest.raises(Unavailable, match="has not ended"):
        pulling.pull(offer, place)
    offering._server.await_pull(missing.uuid, [jax.numpy.zeros(1)])  # the end that `withdraw` gives it
    while not pull.is_done:
        time.sleep(0.001)
    assert len(pulled(pulling.pull(offer, place))[0]) == 8


def test_offers_over_the_limit_are_refused(ports: tuple[JaxBlockPort, JaxBlockPort]) -> None:
    _, contents = blocks_at(place_of(), 8, 8)
    port = JaxBlockPort(dataclasses.replace(OPTIONS, max_bytes=contents.arrays[0].nbytes), jax.devices()[0])
    offer = port.offer(contents)
    with pytest.raises(Unavailable, match="more exceed"):
        port.offer(contents)
    port.withdraw(offer.uuid)
    settle(port)
    port.withdraw(port.offer(contents).uuid)
    settle(port)
    port.close()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"dtype": "int8"}, "data type"),
        ({"block_shape": (2, 4, 8, 8)}, "data type, layers"),
        ({"block_shape": (3,)}, "data type, layers"),
        ({"block_shape": (3, 0, 8, 8)}, "blocks of 0 tokens"),
        ({"num_rows": (9,)}, "9,"),
        ({"positions": ((0, 0),)}, "8 rows have 1 positions"),
        ({"sizes": (1 << 16,)}, "over the limit"),
        ({"parts": ()}, "do not make up"),
        ({"parts": (ArrayPart((0, 0, 0, 0), (3, 4, 8, 4)),)}, "do not make up"),
        ({"parts": (ArrayPart((0, 0, 0, 4), (3, 4, 8, 8)),)}, "do not make up"),
        ({"parts": (ArrayPart((0,), (3,)),)}, "part"),
    ],
)
def test_an_offer_that_does_not_fit_is_refused(
    ports: tuple[JaxBlockPort, JaxBlockPort], changes: dict[str, Any], problem: str
) -> None:
    part = ArrayPart((0, 0, 0, 0), (3, 4, 8, 8))
    positions = tuple((index, 0) for index in range(8))
    offer = BlockOffer(1, "127.0.0.1:9", "float32", (3, 4, 8, 8), (part,), (8,), (8,), positions)
    with pytest.raises(Incompatible, match=problem):
        ports[1].pull(dataclasses.replace(offer, **changes), place_of())


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="cannot be used"):
        JaxBlockPort(dataclasses.replace(OPTIONS, address="198.51.100.7:0"), jax.devices()[0])


def test_a_pull_without_memory_for_its_arrays_fails(
    ports: tuple[JaxBlockPort, JaxBlockPort], monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_memory(*_: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    offering, pulling = ports
    offer = offered(offering, blocks_at(place_of(), 8, 5)[1])
    pull = pulling.pull(offer, place_of())
    monkeypatch.setattr(block_port, "_assemble", without_memory)
    with pytest.raises(Unavailable, match="RESOURCE_EXHAUSTED"):
        pulled(pull)
    offering.release(offer.uuid)


def knock(port: str, host: str) -> bool:
    """Connect from an address of this machine to a port; return False if no packet is answered."""
    with socket.socket() as client:
        client.settimeout(0.05)
        client.bind((host, 0))
        try:
            client.connect(("127.0.0.1", int(port.rpartition(":")[2])))
        except TimeoutError:
            return False
        return True


def test_other_hosts_cannot_connect_until_they_are_admitted(ports: tuple[JaxBlockPort, JaxBlockPort]) -> None:
    offering, _ = ports
    sockets = offering._peers._sockets
    assert len(sockets) == 2  # the library opens another port for bulk data
    for one in sockets:
        assert not knock(f":{one.getsockname()[1]}", "127.0.0.2")
    for host in ("127.0.0.3", "localhost", "::1", "", "::ffff:127.0.0.4"):
        offering.admit(host)
    for host, is_admitted in (("127.0.0.1", True), ("127.0.0.2", False), ("127.0.0.3", True), ("127.0.0.4", True)):
        assert knock(offering.address, host) is is_admitted


def test_the_filter_compares_whole_addresses() -> None:
    """All four words of IPv6, where this machine has it."""
    families = [(socket.AF_INET, "127.0.0.1", "127.0.0.2", "127.1.0.1")]
    if has_ipv6():
        families.append((socket.AF_INET6, "::1", "::2", "1::1"))
    for family, host, own, admitted in families:
        with socket.socket(family) as listener, socket.socket(family) as client, socket.socket(family) as other:
            listener.bind((host, 0))
            listener.listen()
            peers = block_port.PeerFilter(host, [listener])
            client.settimeout(1)
            client.connect(listener.getsockname())
            peers._own, peers._fixed = ipaddress.ip_address(own), (ipaddress.ip_address(own),)
            peers.admit(admitted)
            other.settimeout(0.05)
            with pytest.raises(TimeoutError):
                other.connect(listener.getsockname())


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


def test_the_number_of_admitted_hosts_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_port, "_MAX_PEERS", 2)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        peers = block_port.PeerFilter("127.0.0.1", [listener], ["127.0.0.9"])
        for host in ("127.0.0.2", "127.0.0.3", "127.0.0.4"):
            peers.admit(host)
        address = f":{listener.getsockname()[1]}"
        found = [knock(address, f"127.0.0.{number}") for number in (1, 2, 3, 4, 9)]
        assert found == [True, False, True, True, True]


def test_a_kernel_that_limits_the_filter_admits_the_latest_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        peers, attach = block_port.PeerFilter("127.0.0.1", [listener]), block_port.PeerFilter._attach

        def limited(self: block_port.PeerFilter) -> None:
            if len(self._admitted) > 2:
                raise OSError(errno.ENOMEM, "net.core.optmem_max")
            attach(self)

        monkeypatch.setattr(block_port.PeerFilter, "_attach", limited)
        for host in ("127.0.0.2", "127.0.0.3", "127.0.0.2", "127.0.0.4"):
            peers.admit(host)
        address = f":{listener.getsockname()[1]}"
        assert [knock(address, f"127.0.0.{number}") for number in (1, 2, 3, 4)] == [True, True, False, True]


def test_the_search_for_listeners_leaves_no_descriptors() -> None:
    with tempfile.TemporaryFile(), socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        num_before = len(os.listdir("/proc/self/fd"))
        found = block_port._find_listeners("127.0.0.1")
        assert listener.getsockname() in found
        for one in found.values():
            one.close()
        assert len(os.listdir("/proc/self/fd")) == num_before


@pytest.mark.long
@pytest.mark.parametrize(("host", "survives"), [("127.0.0.2", True), ("127.0.0.1", False)])
def test_a_server_outlives_other_bytes_from_other_hosts(host: str, survives: bool) -> None:
    """Zeros end a process with a port of the library, if they arrive: the second case shows that the test can fail."""
    code = (
        "import jax, sys; from jpaged.config import DataPortOptions; "
        "from jpaged.device.block_port import JaxBlockPort; "
        "port = JaxBlockPort(DataPortOptions('127.0.0.1:0', None, 1 << 20, 2.0), jax.devices()[0]); "
        "print(port.address, flush=True); sys.stdin.readline(); print(port.num_bytes_offered, flush=True)"
    )
    command, environment = [sys.executable, "-c", code], {**os.environ, "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        port = int(process.stdout.readline().rpartition(":")[2])
        with socket.socket() as client, contextlib.suppress(OSError):
            client.settimeout(2.0)
            client.bind((host, 0))
            client.connect(("127.0.0.1", port))
            client.sendall(bytes(4096))
            time.sleep(5)
        answer, _ = process.communicate("\n")
    assert answer.strip() == ("0" if survives else "")
