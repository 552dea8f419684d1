"""Options of `--kv-transfer-config`: a connector that stores blocks, or a data port between servers."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jpaged.config.option import checked_keys, option, parse_json_object, shorten
from jpaged.distributed_env import split_address
from jpaged.errors import InvalidArgument

_TRANSFER = "kv_transfer_config"
_UNUSED_TRANSFER_KEYS = ("engine_id", "kv_buffer_size", "kv_rank", "kv_ip", "kv_port")
"""Keys of vLLM that only its own connectors read; any value is accepted."""
_FIXED_TRANSFER_KEYS: Mapping[str, tuple[Any, str]] = {
    "kv_role": ("kv_both", "a connector both saves and loads blocks; --role separates prefill from decode"),
    "kv_parallel_size": (1, "a connector belongs to one server"),
    "kv_buffer_device": ("cpu", "blocks pass through host memory"),
    "kv_load_failure_policy": ("recompute", "blocks that cannot be loaded are computed"),
    "enable_permute_local_kv": (False, "blocks keep the layout of this server"),
}
"""Keys of vLLM with the one value that is supported, and the reason."""
_REMEDIES: Mapping[str, str] = {
    **dict.fromkeys(
        ("NixlConnector", "P2pNcclConnector", "MooncakeConnector", "MoRIIOConnector"),
        "for separate prefill and decode servers use role",
    ),
    **dict.fromkeys(
        ("OffloadingConnector", "SimpleCPUOffloadConnector"), "for host memory use swap_space, for disk kv_disk_space"
    ),
    **dict.fromkeys(
        ("SharedStorageConnector", "ExampleConnector", "LMCacheConnectorV1", "LMCacheMPConnector"),
        "for local disk use kv_disk_space",
    ),
    "MultiConnector": "only one store is supported below host memory",
}
"""Connectors of vLLM, and what does their work here."""
_OWN_MODULES: Mapping[str, str] = {"MooncakeStoreConnector": "jpaged.engine.kv_cache.offload.mooncake"}
"""Connectors of vLLM that jpaged implements, and their modules."""


@dataclass(frozen=True, slots=True)
class KVTransferOptions:
    """Options of a KV connector, in vLLM's format: `--kv-transfer-config`.

        {"kv_connector": "MyConnector", "kv_connector_module_path": "my_module", "kv_role": "kv_both",
         "kv_connector_extra_config": {"path": "/mnt/kv"}}

    Keys and meanings are those of vLLM's `KVTransferConfig`
    (https://docs.vllm.ai/en/latest/api/vllm/config/kv_transfer/). A key that is unknown is an error, and so is a value
    that would need another engine.

    Attributes:
        kv_connector: name of a class that implements `jpaged.engine.kv_cache.connector.KVConnector`.
        kv_connector_module_path: name of the module with the class; only jpaged's own connectors need none.
        kv_connector_extra_config: options that only the connector reads.
    """

    kv_connector: str
    kv_connector_module_path: str
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> KVTransferOptions:
        """Parse the options of a JSON object; null counts as absent.

        Raises:
            InvalidArgument: it is not a JSON object, a key is unknown or missing, or a value is not supported.
        """
        values = parse_json_object(_TRANSFER, text, '{"kv_connector": "MyConnector", ...}')
        known = (*cls.__dataclass_fields__, *_FIXED_TRANSFER_KEYS, *_UNUSED_TRANSFER_KEYS)
        for key in values:
            if key not in known:
                raise InvalidArgument(f"{_TRANSFER}.{shorten(key)}", f"is unknown: must be one of {', '.join(known)}")
        given = {key: value for key, value in values.items() if value is not None}
        for key, (supported, reason) in _FIXED_TRANSFER_KEYS.items():
            if given.get(key, supported) != supported:
                problem = f"{shorten(repr(given[key]))} is not supported: must be {supported!r}, because {reason}"
                raise InvalidArgument(f"{_TRANSFER}.{key}", problem)
        name = cls._word(given, "kv_connector", "it names the class of the connector")
        if "kv_connector_module_path" not in given and name in _REMEDIES:
            problem = f"{name} is a connector of vLLM: {_REMEDIES[name]}"
            raise InvalidArgument(f"{_TRANSFER}.kv_connector", problem)
        extra = given.get("kv_connector_extra_config", {})
        if not isinstance(extra, dict):
            problem = f"{shorten(repr(extra))} is not a JSON object"
            raise InvalidArgument(f"{_TRANSFER}.kv_connector_extra_config", problem)
        if "kv_connector_module_path" not in given and name in _OWN_MODULES:
            given["kv_connector_module_path"] = _OWN_MODULES[name]
            MooncakeOptions.parse(extra)
        path = cls._word(given, "kv_connector_module_path", f"it names the module with the class {name}")
        return cls(name, path, extra)

    @staticmethod
    def _word(given: Mapping[str, Any], key: str, meaning: str) -> str:
        value = given.get(key)
        if value is None:
            raise InvalidArgument(f"{_TRANSFER}.{key}", f"is missing: {meaning}")
        if not isinstance(value, str) or not value:
            raise InvalidArgument(f"{_TRANSFER}.{key}", f"{shorten(repr(value))} is not a name: {meaning}")
        return value


_MOONCAKE = f"{_TRANSFER}.kv_connector_extra_config"
_UNUSED_MOONCAKE_KEYS = (
    *("load_async", "lookup_async", "save_decode_cache", "enable_lookup", "lookup_rpc_port", "enable_offload"),
    *("enable_cross_layers_blocks", "enable_group_semantics"),
    *("enable_ssd_offload", "ssd_offload_path", "enable_client_http_server", "client_http_port"),
)
"""Keys of vLLM and Mooncake that change no result and have no counterpart here; any value is accepted."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class MooncakeOptions:
    """Options of the connector MooncakeStoreConnector, by the names of Mooncake and vLLM.

    They are keys of `kv_connector_extra_config`, or of the JSON file that MOONCAKE_CONFIG_PATH names. The former win.
    """

    master_server_address: str = option("", "HOST:PORT of mooncake_master")
    metadata_server: str = option("P2PHANDSHAKE", "metadata server of Mooncake's transfer engine")
    protocol: str = option("tcp", "protocol of Mooncake's transfer engine, such as tcp or rdma")
    device_name: str = option("", "RDMA devices, separated by commas")
    local_hostname: str = option("", "address of this host for the others; if empty, the one that reaches the master")
    global_segment_size: int = option(4 << 30, "memory that this server adds to the store", low=0, unit="bytes")
    local_buffer_size: int = option(128 << 20, "memory for Mooncake's own buffers", low=1 << 20, unit="bytes")
    mode: str = option("embedded", "standalone-store adds no memory", choices=("embedded", "standalone-store"))
    tenant_id: str = option("default", "tenant of Mooncake's master")
    cache_prefix: str = option("", "beginning of every key, for fleets that share a master but no blocks")
    call_timeout: float = option(5.0, "time after which a call counts as hung", low=0.01, high=30.0, unit="s")

    @classmethod
    def parse(cls, extra: Mapping[str, Any], file: Mapping[str, Any] | None = None) -> MooncakeOptions:
        """Merge and validate the keys.

        Args:
            extra: `kv_connector_extra_config`.
            file: contents of the file that MOONCAKE_CONFIG_PATH names; unknown keys in it are ignored.

        Raises:
            InvalidArgument: a key of `extra` is unknown, or a value has the wrong type or is out of range.
        """
        known = {key: value for key, value in (file or {}).items() if key in cls.__dataclass_fields__}
        values = {**known, **extra}
        for key in ("global_segment_size", "local_buffer_size"):
            if isinstance(size := values.get(key), str):
                values[key] = _parse_size(f"{_MOONCAKE}.{key}", size)
        options = cls(**checked_keys(cls, _MOONCAKE, values, _UNUSED_MOONCAKE_KEYS))
        is_embedded = options.mode == "embedded"
        if not is_embedded and values.get("global_segment_size"):
            problem = f"is {options.global_segment_size}: must be 0 in mode standalone-store, which adds no memory"
            raise InvalidArgument(f"{_MOONCAKE}.global_segment_size", problem)
        if options.master_server_address:
            split_address(f"{_MOONCAKE}.master_server_address", options.master_server_address)
        return options

    @property
    def segment_bytes(self) -> int:
        """Return the memory that this server adds to the store."""
        return self.global_segment_size if self.mode == "embedded" else 0

    def check_master(self) -> None:
        """Raise InvalidArgument if no master is named."""
        if not self.master_server_address:
            problem = "is missing: it is the HOST:PORT of mooncake_master, here or in the file of MOONCAKE_CONFIG_PATH"
            raise InvalidArgument(f"{_MOONCAKE}.master_server_address", problem)


def _parse_size(name: str, text: str) -> int:
    """Return the bytes of a size such as "4GB", of which a kilobyte has 1024; raise InvalidArgument for others."""
    if (found := _SIZE.fullmatch(text.strip())) is None:
        raise InvalidArgument(name, f"{shorten(repr(text))} is not a size, such as 4GB")
    return int(float(found[1]) * 1024 ** ("kmgt".find(found[2].lower()) + 1 if found[2] else 0))


@dataclass(frozen=True, slots=True)
class _DataPortConfig:
    """`kv_connector_extra_config` of a data port."""

    address: str = option("", "HOST:PORT to listen on; HOST is the numeric address of one interface")
    pull_timeout: float = option(
        2.0, "time after which a pull of blocks counts as failed", low=0.01, high=3600.0, unit="s"
    )
    allowed_peers: tuple[str, ...] = option(
        (), "numeric addresses that may connect in addition to those from which servers call Prefill"
    )


@dataclass(frozen=True, slots=True)
class DataPortOptions:
    """Options of a data port, `kv_connector` "jax" of `--kv-transfer-config`.

        {"kv_connector": "jax", "kv_role": "kv_both", "kv_buffer_size": 1e9,
         "kv_connector_extra_config": {"address": "127.0.0.1:0", "pull_timeout": 2.0}}

    Attributes:
        address: HOST:PORT to listen on.
        role: role of this server that vLLM's `kv_role` allows; None allows both.
        max_bytes: maximum of offered blocks, and of one pull.
        pull_timeout: seconds after which a pull counts as failed.
        allowed_peers: numeric addresses that may connect, in addition to those of servers that call Prefill.
    """

    address: str
    role: str | None
    max_bytes: int
    pull_timeout: float
    allowed_peers: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> DataPortOptions | None:
        """Parse the options of a JSON object; return None if it selects another connector.

        Raises:
            InvalidArgument: it is not a JSON object, a key is unknown or missing, or a value is not supported.
        """
        values = parse_json_object(_TRANSFER, text, '{"kv_connector": "jax", ...}')
        given = {key: value for key, value in values.items() if value is not None}
        if given.get("kv_connector") != "jax" or "kv_connector_module_path" in given:
            return None
        known = ("kv_connector", "kv_role", "kv_buffer_size", "kv_connector_extra_config")
        if unknown := [key for key in given if key not in known]:
            problem = f"is not supported by kv_connector jax: its keys are {', '.join(known)}"
            raise InvalidArgument(f"{_TRANSFER}.{shorten(unknown[0])}", problem)
        role, extra = given.get("kv_role", "kv_both"), given.get("kv_connector_extra_config", {})
        if role not in _PORT_ROLES:
            problem = f"{shorten(repr(role))} is not one of {', '.join(_PORT_ROLES)}"
            raise InvalidArgument(f"{_TRANSFER}.kv_role", problem)
        name = f"{_TRANSFER}.kv_connector_extra_config"
        if not isinstance(extra, dict):
            raise InvalidArgument(name, f"{shorten(repr(extra))} is not a JSON object")
        config = _DataPortConfig(**checked_keys(_DataPortConfig, name, extra))
        size = given.get("kv_buffer_size", 1e9)
        if isinstance(size, bool) or not isinstance(size, int | float) or size < _MIN_BUFFER_BYTES:
            problem = f"{shorten(repr(size))} is not a number of bytes from {_MIN_BUFFER_BYTES}"
            raise InvalidArgument(f"{_TRANSFER}.kv_buffer_size", problem)
        address = _numeric_address(f"{name}.address", config.address)
        peers = tuple(_checked_peer(f"{name}.allowed_peers", peer, address) for peer in config.allowed_peers)
        return cls(address, _PORT_ROLES[role], int(size), config.pull_timeout, peers)

    def check(self, role: str) -> None:
        """Reject another role of the server than the port's.

        Raises:
            InvalidArgument: states why.
        """
        if role == "both":
            raise InvalidArgument(_TRANSFER, "kv_connector jax requires the role prefill or decode")
        if self.role not in (None, role):
            raise InvalidArgument(f"{_TRANSFER}.kv_role", f"is for the role {self.role}; this server's is {role}")


_PORT_ROLES: Mapping[str, str | None] = {"kv_both": None, "kv_producer": "prefill", "kv_consumer": "decode"}
_MIN_BUFFER_BYTES = 1 << 20


def _plain_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return a numeric address; an IPv4 address in IPv6 form as IPv4, because its packets are."""
    found = ipaddress.ip_address(host)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return found if mapped is None else mapped


def _checked_peer(name: str, peer: str, address: str) -> str:
    """Return a numeric address; reject one that cannot connect to another one."""
    version = ipaddress.ip_address(split_address(name, address)[0]).version
    try:
        found = _plain_address(peer)
    except ValueError:
        raise InvalidArgument(name, f"{shorten(repr(peer))} is not a numeric address") from None
    if found.version != version:
        raise InvalidArgument(name, f"{peer} cannot connect to {address}: one is IPv4, the other IPv6")
    return str(found)


def _numeric_address(name: str, value: str) -> str:
    """Return the HOST:PORT of one interface; raise InvalidArgument for any other value."""
    if not value:
        raise InvalidArgument(name, "is missing: it is the HOST:PORT to listen on, such as 127.0.0.1:0")
    host, port = split_address(name, value)
    try:
        found = _plain_address(host)
    except ValueError:
        problem = f"{value}: HOST must be a numeric address, because a name may bind every interface"
        raise InvalidArgument(name, problem) from None
    if found.is_unspecified or found.is_multicast:
        problem = f"{value}: HOST must be the address of one interface, because each client of the port is trusted"
        raise InvalidArgument(name, problem)
    return f"{found}:{port}" if found.version == 4 else value
