"""Data port over `jax.experimental.transfer`: device arrays from one server to another without host copies.

What the library does, as observed with jaxlib 0.10 on CPU devices, and what this module does about it:

    a pull of an offer that does not exist never ends, and its timeout has no effect
        -> pull only what control has announced; poll, never wait; pull nothing more from a port while one is pending
    an offer stays in memory until it is pulled
        -> `withdraw` pulls it from this process; if the other side was faster, a byte under its number ends that pull
    if a peer is killed, its pulls fail in 0.03 s, except on a connection that was never established
        -> a pull counts as lost after the caller's timeout, and a restarted peer has another address
    other bytes than the protocol's, from any client, or peers with other transports, end the process
        -> the kernel drops packets from all hosts except those of peers (`PeerFilter`); equal versions on both sides
    "localhost" binds all interfaces
        -> names are rejected (`DataPortOptions`)
"""

from __future__ import annotations

import ctypes
import ipaddress
import math
import os
import secrets
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from jpaged.config import DataPortOptions
from jpaged.device.transfers import BlockPlace
from jpaged.engine.executor import ArrayPart, BlockArrays, BlockOffer
from jpaged.errors import Incompatible, InternalError, InvalidArgument, Unavailable, Unsupported

_DRAIN_S = 1.0
"""Time after which an offer that is withdrawn counts as pulled by the other server."""


_SO_ATTACH_FILTER, _LOAD_WORD, _JUMP_IF_EQUAL, _RETURN, _NETWORK_HEADER = 26, 0x20, 0x15, 0x06, 0xFFF00000
_SOURCE_OFFSETS = {4: 12, 6: 8}
_MAX_PEERS = 256


class PeerFilter:
    """Addresses from which the listening sockets accept packets; the kernel drops all others before a connection.

    A filter of the sockets (classic BPF), which needs no privilege. Any thread may call.

    Args:
        host: numeric address on which the sockets listen; this host may always connect.
        sockets: those that listen.
    """

    def __init__(self, host: str, sockets: Sequence[socket.socket], peers: Sequence[str] = ()) -> None:
        self._lock = threading.Lock()
        self._own = ipaddress.ip_address(host)
        self._sockets = tuple(sockets)
        self._fixed = (self._own, *map(ipaddress.ip_address, peers))
        self._admitted: dict[object, None] = {}
        self._attach()

    def admit(self, host: str) -> None:
        """Accept packets from a numeric address; others are ignored."""
        try:
            peer = ipaddress.ip_address(host)
        except ValueError:
            return
        if isinstance(peer, ipaddress.IPv6Address) and self._own.version == 4 and peer.ipv4_mapped is not None:
            peer = peer.ipv4_mapped
        with self._lock:
            if peer.version != self._own.version or peer in self._fixed:
                return
            if peer in self._admitted:
                self._admitted[peer] = self._admitted.pop(peer)  # now used last
                return
            self._admitted[peer] = None
            if len(self._admitted) > _MAX_PEERS:
                del self._admitted[next(iter(self._admitted))]
            self._attach_most()

    def close(self) -> None:
        """Close the descriptors; the sockets and their filter stay."""
        for one in self._sockets:
            one.close()

    def _attach_most(self) -> None:
        """Attach a filter; drop the oldest peers if the kernel limits it to fewer (net.core.optmem_max)."""
        while True:
            try:
                return self._attach()
            except OSError:
                if len(self._admitted) == 1:
                    self._admitted.clear()
                    raise
                del self._admitted[next(iter(self._admitted))]

    def _attach(self) -> None:
        begin, program = _NETWORK_HEADER + _SOURCE_OFFSETS[self._own.version], b""
        for peer in (*self._fixed, *self._admitted):
            words = struct.unpack(f"!{len(peer.packed) // 4}I", peer.packed)  # type: ignore[attr-defined]
            for index, word in enumerate(words):  # a word that differs skips the rest of this address
                program += struct.pack("HBBI", _LOAD_WORD, 0, 0, begin + 4 * index)
                program += struct.pack("HBBI", _JUMP_IF_EQUAL, 0, 2 * (len(words) - index) - 1, word)
            program += struct.pack("HBBI", _RETURN, 0, 0, 0xFFFFFFFF)
        program += struct.pack("HBBI", _RETURN, 0, 0, 0)
        code = ctypes.create_string_buffer(program, len(program))
        option = struct.pack("HL", len(program) // 8, ctypes.addressof(code))
        for one in self._sockets:
            one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, option)


def _find_listeners(host: str) -> dict[tuple[str, int], socket.socket]:
    """Return duplicates of this process's sockets that listen on an address, by address and port."""
    found: dict[tuple[str, int], socket.socket] = {}
    try:
        names = os.listdir("/proc/self/fd")
    except FileNotFoundError:
        raise Unsupported(
            "kv_connector jax: data ports need Linux, which filters the packets of their sockets"
        ) from None
    for name in names:
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            descriptor = os.dup(int(name))
        except OSError:  # closed since
            continue
        try:
            one = socket.socket(fileno=descriptor)
        except OSError:  # another file has this number since
            os.close(descriptor)
            continue
        is_tcp = one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM
        is_listening = is_tcp and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        address = one.getsockname()[:2] if is_listening else ("", 0)
        if address[0] == host and address not in found:
            found[address] = one
        else:
            one.close()
    return found


def _start_server(options: DataPortOptions, device: jax.Device) -> tuple[Any, PeerFilter]:
    """Start the library's server, closed to all other hosts; raise InvalidArgument if the address cannot be used."""
    host = options.address.rpartition(":")[0]
    bare_host = str(ipaddress.ip_address(host.strip("[]")))
    before = _find_listeners(bare_host)
    try:
        server = transfer.start_transfer_server(device.client, options.address, [f"{host}:0"])
    except jax.errors.JaxRuntimeError as error:
        name = "kv_transfer_config.kv_connector_extra_config.address"
        raise InvalidArgument(name, f"{options.address} cannot be used: {error}") from None
    finally:
        after = _find_listeners(bare_host)
        for one in (*before.values(), *(after[address] for address in before if address in after)):
            one.close()
    listeners = {address: one for address, one in after.items() if address not in before}
    if int(server.address().rpartition(":")[2]) not in {port for _, port in listeners}:
        raise InternalError(f"no socket listens on {server.address()}, so that it cannot be closed to other hosts")
    return server, PeerFilter(bare_host, [*listeners.values()], options.allowed_peers)


@dataclass(slots=True)
class _Drain:
    """An offer that this process pulls itself, to free its memory."""

    uuid: int
    arrays: Sequence[jax.Array]
    since_s: float
    num_bytes: int
    is_ended: bool = False


class JaxBlockPort:
    """Implements `engine.executor.BlockPort`.

    Args:
        device: any device of this process.
    """

    def __init__(self, options: DataPortOptions, device: jax.Device, clock: Callable[[], float] = time.monotonic):
        self.protocol = f"jax/{jaxlib.version.__version__}/{device.platform}"
        self._max_bytes = options.max_bytes
        self._clock = clock
        self._server, self._peers = _start_server(options, device)
        self.address: str = self._server.address()
        self._lock = threading.RLock()
        self._own: Any = None  # the connection to this process
        self._connections: dict[str, Any] = {}
        self._abandoned: dict[str, list[Sequence[jax.Array]]] = {}
        self._offers: dict[int, list[jax.ShapeDtypeStruct]] = {}
        self._drains: list[_Drain] = []
        self._num_bytes = 0

    @property
    def num_bytes_offered(self) -> int:
        return self._num_bytes

    @property
    def is_settled(self) -> bool:
        return not self._drains

    def admit(self, host: str) -> None:
        self._peers.admit(host)

    # --- offers -----------------------------------------------------------------------------------------------------

    def offer(self, contents: BlockArrays) -> BlockOffer:
        first = contents.arrays[0]
        parts, shards = _cut(contents.arrays)
        num_bytes = sum(shard.nbytes for shard in shards)
        with self._lock:
            if self._num_bytes + num_bytes > self._max_bytes:
                raise Unavailable(f"offers of {self._num_bytes} bytes; {num_bytes} more exceed {self._max_bytes}")
            uuid = secrets.randbelow(2**63 - 1) + 1
            self._server.await_pull(uuid, shards)
            self._offers[uuid] = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=s.sharding) for s in shards]
            self._num_bytes += num_bytes
        sizes = tuple(len(array) for array in contents.arrays)
        shape = tuple(first.shape[1:])
        return BlockOffer(uuid, self.address, str(first.dtype), shape, parts, sizes, contents.num_rows)

    def release(self, uuid: int) -> None:
        with self._lock:
            if (structs := self._offers.pop(uuid, None)) is not None:
                self._num_bytes -= _num_bytes(structs)

    def withdraw(self, uuid: int) -> None:
        with self._lock:
            if (structs := self._offers.pop(uuid, None)) is None:
                return
            if self._own is None:
                self._own = self._server.connect(self.address)
            arrays = self._own.pull(uuid, structs)
            self._drains.append(_Drain(uuid, arrays, self._clock(), _num_bytes(structs)))

    def sweep(self) -> None:
        with self._lock:
            drains, self._drains = self._drains, []
            for drain in drains:
                is_drained = are_ready(drain.arrays)
                if not drain.is_ended and (is_drained or self._clock() - drain.since_s > _DRAIN_S):
                    # Whoever lost, this process or the other server, waits for a pull that must end with an error.
                    self._server.await_pull(drain.uuid, [jnp.zeros(1, jnp.uint8)] * len(drain.arrays))
                    drain.is_ended = True
                if is_drained:
                    self._num_bytes -= drain.num_bytes
                else:
                    self._drains.append(drain)

    def close(self) -> None:
        with self._lock:
            for uuid in tuple(self._offers):
                self.withdraw(uuid)
        self._peers.close()

    # --- pulls ------------------------------------------------------------------------------------------------------

    def pull(self, offer: BlockOffer, place: object) -> JaxBlockPull:
        assert isinstance(place, BlockPlace)
        _check_offer(offer, place, self._max_bytes)
        devices = tuple(place.sharding.mesh.devices.flat)
        homes = [SingleDeviceSharding(devices[index % len(devices)]) for index in range(len(offer.parts))]
        structs = [
            jax.ShapeDtypeStruct((size, *part.shape), jnp.dtype(offer.dtype), sharding=home)
            for size in offer.sizes
            for part, home in zip(offer.parts, homes, strict=True)
        ]
        self._peers.admit(offer.address.rpartition(":")[0].strip("[]"))
        with self._lock:
            self._check_abandoned(offer.address)
            try:
                if offer.address not in self._connections:
                    self._connections[offer.address] = self._server.connect(offer.address)
                shards = self._connections[offer.address].pull(offer.uuid, structs)
            except jax.errors.JaxRuntimeError as error:
                self.drop(offer.address)
                raise Unavailable(f"the pull from {offer.address} failed: {error}") from error
        return JaxBlockPull(self, offer, place, shards)

    def drop(self, address: str) -> None:
        """Open a new connection for the next pull from an address."""
        with self._lock:
            self._connections.pop(address, None)

    def abandon(self, address: str, shards: Sequence[jax.Array]) -> None:
        """Pull nothing from an address until a pull that takes too long has ended."""
        with self._lock:
            self._abandoned.setdefault(address, []).append(shards)

    def _check_abandoned(self, address: str) -> None:
        left = [shards for shards in self._abandoned.pop(address, ()) if not are_ready(shards)]
        if left:
            self._abandoned[address] = left
            raise Unavailable(f"an earlier pull from {address} has not ended")


class JaxBlockPull:
    """Implements `engine.executor.BlockPull`."""

    def __init__(self, port: JaxBlockPort, offer: BlockOffer, place: BlockPlace, shards: Sequence[jax.Array]) -> None:
        self._port = port
        self._offer = offer
        self._place = place
        self._shards = shards

    @property
    def is_done(self) -> bool:
        return are_ready(self._shards)

    def take(self) -> tuple[BlockArrays, tuple[tuple[int, int], ...]]:
        try:
            jax.block_until_ready(self._shards)
            return self._joined()
        except jax.errors.JaxRuntimeError as error:  # a lost peer, or no device memory for the joined arrays
            self._port.drop(self._offer.address)
            raise Unavailable(f"the pull from {self._offer.address} failed: {error}") from None

    def _joined(self) -> tuple[BlockArrays, tuple[tuple[int, int], ...]]:
        offer, place = self._offer, self._place
        num_parts = len(offer.parts)
        wholes = [
            _assemble(self._shards[start : start + num_parts], offer, place)
            for start in range(0, len(self._shards), num_parts)
        ]
        contents = BlockArrays(tuple(wholes), offer.num_rows)
        if offer.block_shape[1] == place.layout.block_size:
            return contents, offer.positions
        return _reblock(contents, offer, place)

    def abandon(self) -> None:
        self._port.abandon(self._offer.address, self._shards)


def are_ready(arrays: Sequence[Any]) -> bool:
    """Return True if arrays, or errors in their place, have arrived."""
    return all(array.is_ready() for array in arrays)


def _num_bytes(structs: Sequence[Any]) -> int:
    return sum(math.prod(struct.shape) * struct.dtype.itemsize for struct in structs)


def _cut(arrays: Sequence[jax.Array]) -> tuple[tuple[ArrayPart, ...], list[jax.Array]]:
    """Return the parts of a block, and the arrays of the parts, array after array."""
    parts: dict[ArrayPart, None] = {}
    shards: list[jax.Array] = []
    for array in arrays:
        found = {}
        for shard in array.addressable_shards:
            begin = tuple(one.start or 0 for one in shard.index[1:])
            found[ArrayPart(begin, tuple(shard.data.shape[1:]))] = shard.data
        parts = parts or dict.fromkeys(sorted(found, key=lambda part: part.begin))
        shards += [found[part] for part in parts]
    return tuple(parts), shards


def _check_offer(offer: BlockOffer, place: BlockPlace, max_bytes: int) -> None:
    """Raise Incompatible unless the blocks of an offer can be stored in a pool."""
    layout, shape = place.layout, offer.block_shape
    wanted = (layout.num_layers, *layout.token_shape)
    if len(shape) < 2 or (shape[0], *shape[2:]) != wanted or offer.dtype != str(layout.storage_dtype):
        there, here = (offer.dtype, (shape[:1], shape[2:])), (str(layout.storage_dtype), wanted)
        raise Incompatible(f"data type, layers and shape of a token are {there} there and {here} here")
    if shape[1] < 1 or not all(0 <= rows <= size for rows, size in zip(offer.num_rows, offer.sizes, strict=True)):
        raise Incompatible(f"offer: {offer.num_rows} rows of arrays of {offer.sizes}, blocks of {shape[1]} tokens")
    if sum(offer.num_rows) != len(offer.positions):
        raise Incompatible(f"offer: {sum(offer.num_rows)} rows have {len(offer.positions)} positions")
    num_bytes = sum(offer.sizes) * math.prod(shape) * layout.storage_dtype.itemsize
    if num_bytes > max_bytes:
        raise Incompatible(f"offer: {num_bytes} bytes are over the limit of {max_bytes} (kv_buffer_size)")
    covered = np.zeros(shape, np.uint8)
    for part in offer.parts:
        if len(part.begin) != len(shape) or len(part.shape) != len(shape):
            raise Incompatible(f"offer: part {part} of blocks of {shape}")
        covered[tuple(slice(begin, begin + size) for begin, size in zip(part.begin, part.shape, strict=True))] += 1
    if (covered != 1).any() or sum(math.prod(part.shape) for part in offer.parts) != covered.size:
        raise Incompatible(f"offer: the parts of a block do not make up {shape}")


def _assemble(shards: Sequence[jax.Array], offer: BlockOffer, place: BlockPlace) -> jax.Array:
    """Return one array in the sharding of the pool; parts that are equal on both sides are not copied."""
    whole_shape = (len(shards[0]), *offer.block_shape)
    by_part = dict(zip(offer.parts, shards, strict=True))
    mine: list[jax.Array] = []
    for device, index in place.sharding.addressable_devices_indices_map(whole_shape).items():
        slices = [one.indices(size)[:2] for one, size in zip(index or (), whole_shape, strict=True)][1:]
        part = ArrayPart(tuple(low for low, _ in slices), tuple(high - low for low, high in slices))
        if part not in by_part:
            break
        mine.append(jax.device_put(by_part[part], device))
    else:
        return jax.make_array_from_single_device_arrays(whole_shape, place.sharding, mine)
    first = place.sharding.mesh.devices.flat[0]
    whole = jax.device_put(jnp.zeros(whole_shape, shards[0].dtype), first)
    for part, shard in by_part.items():
        whole = jax.lax.dynamic_update_slice(whole, jax.device_put(shard, first), (0, *part.begin))
    return jax.device_put(whole, place.sharding)


_ROW_SIZES = (8, 64, 512)
"""Rows of arrays with another block size: few sizes, so that few programs are compiled."""


def _reblock(
    contents: BlockArrays, offer: BlockOffer, place: BlockPlace
) -> tuple[BlockArrays, tuple[tuple[int, int], ...]]:
    """Return contents in blocks of this server's size, without blocks of which a token is missing."""
    theirs, ours = offer.block_shape[1], place.layout.block_size
    starts = np.cumsum([0, *offer.sizes[:-1]])
    rows = [start + row for start, count in zip(starts, offer.num_rows, strict=True) for row in range(count)]
    slots: dict[tuple[int, int], int] = {}  # by KV group and token: the place in the joined arrays
    for row, (index, kv_group) in zip(rows, offer.positions, strict=True):
        slots.update({(kv_group, index * theirs + offset): row * theirs + offset for offset in range(theirs)})
    wanted = sorted({(token // ours, kv_group) for kv_group, token in slots})
    positions: list[tuple[int, int]] = []
    picked: list[list[int]] = []
    for index, kv_group in wanted:
        places = [slots.get((kv_group, index * ours + offset), -1) for offset in range(ours)]
        if min(places) >= 0:
            positions.append((index, kv_group))
            picked.append(places)
    joined = jnp.concatenate(contents.arrays)
    arrays, num_rows = [], []
    for start in range(0, len(picked), _ROW_SIZES[-1]):
        some = picked[start : start + _ROW_SIZES[-1]]
        places_cb = np.zeros((next(size for size in _ROW_SIZES if size >= len(some)), ours), np.int32)
        places_cb[: len(some)] = some
        arrays.append(jax.device_put(_pick_tokens(joined, places_cb), place.sharding))
        num_rows.append(len(some))
    return BlockArrays(tuple(arrays), tuple(num_rows)), tuple(positions)


@jax.jit
def _pick_tokens(contents: jax.Array, places_cb: jax.Array) -> jax.Array:
    """Return blocks [C', L, B', ...] of the tokens at these places, numbered over the slots of [C, L, B, ...]."""
    size = contents.shape[2]
    by_slot = contents[places_cb // size, :, places_cb % size]  # [C', B', L, ...]
    return jnp.swapaxes(by_slot, 1, 2)
