"""Disaggregated prefill: a server computes whole requests, only prompts, or only the decode part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from jpaged.config.option import option
from jpaged.errors import InvalidArgument

if TYPE_CHECKING:
    from jpaged.config.groups import CacheOptions

Role = Literal["both", "prefill", "decode"]
"""Role of a server."""


@dataclass(frozen=True, slots=True)
class RoleOptions:
    """Disaggregated prefill."""

    role: Role = option(
        "both",
        "role in disaggregated serving; prefill: computes prompts for decode servers, which continue after the "
        "first token (docs/roles.md)",
        choices=get_args(Role),
    )
    prefill_target: tuple[str, ...] = option((), "HOST:PORT of a prefill server, for the role decode; repeatable")
    prefill_min_tokens: int = option(
        256,
        "minimum number of uncached prompt tokens for remote prefill; the decode server computes shorter "
        "prompts itself",
        low=1,
    )
    prefill_timeout: float = option(
        30.0,
        "timeout of a decode server for the first token; afterwards it computes the prompt itself",
        low=0.01,
        high=86400.0,
        unit="s",
    )
    transfer_timeout: float = option(
        10.0,
        "timeout of a decode server for the prompt's KV blocks after the first token; afterwards it computes the "
        "missing ones",
        low=0.01,
        high=86400.0,
        unit="s",
    )
    prefill_hold: float = option(
        10.0,
        "time for which a prefill server keeps a prompt's KV blocks until they are sent",
        low=0.01,
        high=3600.0,
        unit="s",
    )
    prefill_api_key_file: str | None = option(
        None, "file with the API key for prefill servers, of the role control", path="file"
    )
    prefill_tls: bool = option(
        False, "connect to prefill servers over TLS, trusting the system's certificate authorities"
    )
    prefill_tls_ca: str | None = option(
        None, "connect to prefill servers over TLS, trusting only the authorities in this PEM file", path="file"
    )
    prefill_tls_cert: str | None = option(
        None, "client certificate for prefill servers that require one (mutual TLS), in PEM", path="file"
    )
    prefill_tls_key: str | None = option(None, "private key of prefill_tls_cert, in PEM", path="file")

    def check(self, cache: CacheOptions) -> None:
        """Reject conflicting options.

        Raises:
            InvalidArgument: names the options, and why.
        """
        if self.role == "decode" and not self.prefill_target:
            raise InvalidArgument("prefill_target", "is missing: the role decode requires at least one")
        if len(set(self.prefill_target)) < len(self.prefill_target):
            raise InvalidArgument("prefill_target", f"{', '.join(self.prefill_target)} has a duplicate")
        if self.role != "decode":
            for name in _OF_DECODE:
                if getattr(self, name):
                    raise InvalidArgument(name, f"requires the role decode; the role of this server is {self.role}")
        if (self.prefill_tls_cert is None) != (self.prefill_tls_key is None):
            name = "prefill_tls_cert" if self.prefill_tls_cert is None else "prefill_tls_key"
            raise InvalidArgument(name, "is missing: give both prefill_tls_cert and prefill_tls_key")
        if self.role == "both":
            return
        problem = f"{self.role} transfers blocks of the prefix cache"
        if not cache.enable_prefix_caching or cache.kv_policy != "paged":
            what = f"enable_prefix_caching is {cache.enable_prefix_caching}, kv_policy {cache.kv_policy}"
            raise InvalidArgument("role", f"{problem}; {what}")
        if cache.swap_space == 0:
            raise InvalidArgument("role", f"{problem} through host memory; swap_space is 0")


_OF_DECODE = ("prefill_target", "prefill_api_key_file", "prefill_tls", "prefill_tls_ca", "prefill_tls_cert")
