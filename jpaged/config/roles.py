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
        "prefill computes prompts for servers of the role decode, which go on behind the first token (docs/roles.md)",
        choices=get_args(Role),
    )
    prefill_target: tuple[str, ...] = option(
        (), "HOST:PORT of a server of the role prefill, for the role decode; may be repeated"
    )
    prefill_min_tokens: int = option(
        256, "prompts with fewer tokens that are not cached are computed by the decode server itself", low=1
    )
    prefill_timeout: float = option(
        30.0,
        "a decode server waits so long for a first token, and then computes the prompt itself",
        low=0.01,
        high=86400.0,
        unit="s",
    )
    transfer_timeout: float = option(
        10.0,
        "a decode server waits so long for a prompt's blocks behind its first token, and then computes what is missing",
        low=0.01,
        high=86400.0,
        unit="s",
    )
    prefill_hold: float = option(
        10.0,
        "a prefill server keeps a prompt's blocks for so long until they are sent",
        low=0.01,
        high=3600.0,
        unit="s",
    )
    prefill_api_key_file: str | None = option(
        None, "a file with the key that prefill servers let a decode server in with, of the role control", path="file"
    )
    prefill_tls: bool = option(False, "ask prefill servers over TLS, believing whom the system believes")
    prefill_tls_ca: str | None = option(
        None, "ask prefill servers over TLS, and believe the authorities of this PEM file alone", path="file"
    )
    prefill_tls_cert: str | None = option(
        None, "what a decode server shows to prefill servers that want a certificate, as PEM", path="file"
    )
    prefill_tls_key: str | None = option(None, "the private key of prefill_tls_cert, as PEM", path="file")

    def check(self, cache: CacheOptions) -> None:
        """Reject conflicting options.

        Raises:
            InvalidArgument: names the options, and why.
        """
        if self.role == "decode" and not self.prefill_target:
            raise InvalidArgument("prefill_target", "none is given; the role decode needs one at least")
        if len(set(self.prefill_target)) < len(self.prefill_target):
            raise InvalidArgument("prefill_target", f"{', '.join(self.prefill_target)}: one is there twice")
        if self.role != "decode":
            for name in _OF_DECODE:
                if getattr(self, name):
                    raise InvalidArgument(name, f"goes with the role decode; this server's is {self.role}")
        if (self.prefill_tls_cert is None) != (self.prefill_tls_key is None):
            name = "prefill_tls_cert" if self.prefill_tls_cert is None else "prefill_tls_key"
            raise InvalidArgument(name, "is missing: the two go together")
        if self.role == "both":
            return
        problem = f"{self.role} hands on blocks of the prefix cache"
        if not cache.enable_prefix_caching or cache.kv_policy != "paged":
            what = f"enable_prefix_caching is {cache.enable_prefix_caching}, kv_policy {cache.kv_policy}"
            raise InvalidArgument("role", f"{problem}; {what}")
        if cache.swap_space == 0:
            raise InvalidArgument("role", f"{problem} by way of the host's memory; swap_space is 0")


_OF_DECODE = ("prefill_target", "prefill_api_key_file", "prefill_tls", "prefill_tls_ca", "prefill_tls_cert")
