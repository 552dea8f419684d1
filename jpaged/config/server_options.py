"""Sections used only by a server: names, ports, access, telemetry, roles; and timeouts of requests, steps and stalls.

An in-process engine ignores names, ports, access and telemetry.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from jpaged.config.option import option
from jpaged.errors import InvalidArgument

if TYPE_CHECKING:
    from jpaged.config.engine_options import CacheOptions

LogFormat = Literal["text", "json"]
_ROOT_PATH = re.compile(r"(/[\w.~!$&'()*+,;=:@-]+)+/?", re.ASCII)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Served name, ports, and shutdown."""

    served_model_name: str | None = option(None, "model name in the API; the model's own name if unset")
    served_model_aliases: tuple[str, ...] = option(
        (), "further model name that requests may use; repeatable, as further values of --served-model-name in vLLM"
    )
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for every interface")
    port: int = option(50051, "port to listen on; 0 picks a free one", low=0, high=65535)
    max_request_size: float = option(
        1.0,
        "maximum size of a client message; a prompt of 131072 tokens, as text or ids, takes half of the default, which "
        "is 16 with enable_prompt_embeds. "
        "Messages are parsed on the thread that serves every stream, at up to 40 ms per MiB",
        low=0.0625,
        high=64.0,
        unit="MiB",
    )
    max_connections: int = option(
        512,
        "maximum number of open connections, capped at half the process's file descriptor limit; further ones are "
        "closed",
        low=1,
        high=1 << 20,
    )
    connection_idle_timeout: float = option(
        300.0, "time after which a connection without a call is closed", low=0.1, high=86400.0, unit="s"
    )
    max_messages_per_second: int | None = option(
        None,
        "maximum rate of stream messages, over all streams: above it, several tokens of a stream share a message. "
        "No token is delayed more than 0.1 s, first and last tokens never. A message costs 0.1 ms of CPU, which "
        "competes with the model on CPUs",
        low=1,
        high=1_000_000,
        by_platform={"cpu": 500, "gpu": 5000, "tpu": 5000},
    )
    stream_interval: int = option(
        1,
        "number of tokens per message of a stream, under any load: larger values take less CPU and delay tokens until "
        "that many have been generated. The first and the last tokens of a sequence are never delayed",
        low=1,
        high=1 << 16,
    )
    shutdown_timeout: float = option(
        30.0, "time for running requests to finish after SIGTERM", low=0.0, high=86400.0, unit="s"
    )
    enable_reflection: bool = option(True, "serve grpc.reflection, for grpcurl and similar tools")
    enable_open_inference: bool = option(
        True, "serve inference.GRPCInferenceService, the protocol of KServe and Triton clients"
    )
    enable_vllm_engine: bool = option(True, "serve vllm.grpc.engine.VllmEngine, the protocol of gateways")
    disable_control: bool = option(
        False,
        "refuse Abort, PinPrefix, LoadAdapter and their inverses with PERMISSION_DENIED",
    )
    isolate_tenants: bool = option(
        True,
        "isolate tenants (request metadata x-jpaged-tenant): no shared cached prefixes, names of pinned prefixes "
        "or request ids; if off, the tenant only matters to the policy fair",
    )
    max_pinned_blocks: int | None = option(
        None,
        "maximum number of KV blocks for pinned prefixes in each replica's pool; if unset, a quarter of the pool, "
        "as far as that leaves room for a request of max_model_len",
        low=0,
    )
    pin_prefix: str | None = option(
        None,
        "text file with a prefix to pin: it stays cached, exactly as written, for prompts that begin with it",
        path="file",
    )
    metrics_port: int | None = option(
        None,
        "port for Prometheus metrics, on the same host; 0 picks a free one; off if unset",
        low=0,
        high=65535,
    )
    probe_port: int | None = option(
        None,
        "port that serves only grpc.health.v1, on the same host, without TLS or authentication; with several "
        "processes, each has one. 0 picks a free one; off if unset",
        low=0,
        high=65535,
    )


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """The HTTP frontend."""

    enable_http: bool = option(True, "serve the OpenAI-compatible HTTP API, on the same host")
    http_port: int | None = option(
        None,
        "port of the OpenAI-compatible HTTP API; 0 picks a free one; if unset, 8000, or the next free one if that is "
        "taken",
        low=0,
        high=65535,
    )
    root_path: str | None = option(
        None,
        "path under which a reverse proxy serves the HTTP API, such as /llm: requests may have it or not, so that the "
        "proxy may remove it or not",
    )
    http_keep_alive: float = option(
        15.0,
        "interval of keep-alive comments on idle streams, so that proxies do not close them",
        low=0.05,
        high=3600.0,
        unit="s",
    )
    max_response_size: float = option(
        128.0,
        "maximum size of an HTTP response or of a batch output line, estimated before the request runs: a request "
        "whose log-probabilities or embeddings would exceed it is refused. A request in flight holds up to three "
        "times as much memory",
        low=0.0625,
        high=65536.0,
        unit="MiB",
    )
    http_cors_origins: tuple[str, ...] = option(
        (), "allowed CORS origins, such as https://example.com; * for all, none if unset"
    )
    unknown_fields: str = option(
        "ignore",
        "unknown fields of HTTP requests: ignore: they have no effect, are counted and logged once, and the response "
        "names them in x-jpaged-ignored-fields; refuse: they are errors, so that a misspelled field is noticed",
        choices=("ignore", "refuse"),
    )
    enable_force_include_usage: bool = option(
        False, "send the usage with every chunk of streams of completions and chats, whether requests ask for it or not"
    )
    return_tokens_as_token_ids: bool = option(
        False, "name tokens in log-probabilities of completions and chats token_id:N instead of by their text"
    )
    max_response_storage: float = option(
        256.0,
        "maximum size of all stored responses of /v1/responses, which are in memory until the server restarts: the "
        "oldest are removed for newer ones; 0 stores none",
        low=0.0,
        high=1 << 20,
        unit="MiB",
    )
    max_stored_responses: int = option(
        1000,
        "maximum number of stored responses per tenant: the oldest are removed for newer ones",
        low=1,
        high=10_000_000,
    )
    stored_response_expiry: float = option(
        86400.0, "time after which a stored response is removed", low=0.1, high=1e7, unit="s"
    )
    tenant_response_share: float = option(
        0.5,
        "maximum fraction of max_response_storage per tenant (default: half); all with isolate_tenants off",
        low=0.01,
        high=1.0,
    )
    batch_dir: str | None = option(
        None,
        "folder for the files and state of /v1/batches, which resume after a restart; used by one server at a "
        "time; batches are off if unset",
        path="new folder",
    )
    max_batch_file_size: float = option(
        200.0, "maximum size of a batch input file", low=0.0625, high=65536.0, unit="MiB"
    )
    max_batch_lines: int = option(50_000, "maximum number of requests in a batch", low=1, high=10_000_000)
    max_batch_storage: float = option(
        10.0, "maximum total size of all batch files, input and output", low=0.001, high=1 << 20, unit="GiB"
    )
    tenant_batch_share: float = option(
        0.5,
        "maximum fraction that one tenant may take of the uploads, files, bytes and running batches left by other "
        "tenants (default: half); all with isolate_tenants off",
        low=0.01,
        high=1.0,
    )

    def check(self) -> None:
        """Reject options of HTTP if it is off, and an invalid path.

        Raises:
            InvalidArgument: names the option.
        """
        if self.root_path is not None and not _ROOT_PATH.fullmatch(self.root_path):
            raise InvalidArgument("root_path", f"{self.root_path!r} is not a path, such as /llm")
        for name in ("http_port", "batch_dir", "root_path"):
            if not self.enable_http and getattr(self, name) is not None:
                raise InvalidArgument(name, f"{getattr(self, name)} requires HTTP, but enable_http is False")


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """Authentication, limits, audit and TLS."""

    api_keys: str | None = option(
        None,
        "TOML file of API keys, reloaded when it changes: every call except health checks must send one, as "
        "`authorization: Bearer KEY`, and runs as its tenant; no authentication if unset (docs/access.md)",
        path="file",
    )
    api_key: tuple[str, ...] = option(
        (),
        "API key of the role inference, instead of a file of api_keys; repeatable. The process list shows it: prefer "
        "api_keys",
    )
    public_metrics: bool = option(False, "with api_keys: serve /metrics and /version of the HTTP port without a key")
    public_page: bool = option(
        True, "with api_keys: show the live page of the HTTP port, which shows the KV pool and no text, without a key"
    )
    tenant_requests_per_minute: int | None = option(
        None,
        "maximum calls per minute and tenant; unlimited if unset; api_keys may override it",
        low=1,
    )
    tenant_tokens_per_minute: int | None = option(
        None,
        "maximum tokens per minute and tenant, prompt plus output; api_keys may override it",
        low=1,
    )
    tenant_max_streams: int | None = option(
        None, "maximum concurrent calls per tenant; api_keys may override it", low=1
    )
    tenant_max_n: int | None = option(
        None, "maximum sequences in a tenant's request (n, best_of, beams); api_keys may override it", low=1
    )
    tenant_max_prompt_tokens: int | None = option(
        None, "maximum prompt tokens in a tenant's request; api_keys may override it", low=1
    )
    audit_log: str | None = option(
        None,
        "audit log: one JSON line per call with client, time, method, usage and status, never a prompt or an "
        "answer; reopened after log rotation",
        path="new file",
    )
    tls_cert: str | None = option(
        None,
        "TLS certificate chain of the server, in PEM: all ports except metrics and probes use TLS; reloaded when "
        "it changes",
        path="file",
    )
    tls_key: str | None = option(None, "private key of tls_cert, in PEM, unencrypted", path="file")
    tls_client_ca: str | None = option(
        None,
        "CA certificates in PEM; clients must present a certificate signed by one of them (mutual TLS)",
        path="file",
    )

    control_port: int | None = option(
        None,
        "dedicated port for pinning prefixes and loading adapters; 0 picks a free one; if unset, the other ports "
        "accept these calls",
        low=0,
        high=65535,
    )
    control_host: str = option("127.0.0.1", "address of control_port")
    prefix_peers: tuple[str, ...] = option(
        (),
        "servers, as HOST:PORT, whose cached prefixes FetchPrefix may import, with the key of its caller; none if "
        "unset",
    )
    prefix_peer_ca: str | None = option(
        None,
        "CA certificates in PEM for prefix_peers, to which this server presents tls_cert; plaintext if unset",
        path="file",
    )

    @property
    def has_keys(self) -> bool:
        """True if calls need an API key."""
        return self.api_keys is not None or bool(self.api_key)

    def check(self) -> None:
        """Reject conflicting options; raise InvalidArgument."""
        if self.api_key and self.api_keys is not None:
            raise InvalidArgument("api_key", f"is given together with api_keys ({self.api_keys}): give only one")
        if (self.tls_cert is None) != (self.tls_key is None):
            missing, given = ("tls_cert", "tls_key") if self.tls_cert is None else ("tls_key", "tls_cert")
            raise InvalidArgument(missing, f"is missing: {given} ({getattr(self, given)}) requires it")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise InvalidArgument("tls_client_ca", f"{self.tls_client_ca} needs tls_cert and tls_key")
        if self.prefix_peer_ca is not None and not self.prefix_peers:
            raise InvalidArgument("prefix_peer_ca", f"{self.prefix_peer_ca} needs prefix_peers")


@dataclass(frozen=True, slots=True)
class TelemetryOptions:
    """Traces and logs."""

    otlp_traces_endpoint: str | None = option(
        None,
        "OTLP/gRPC trace collector, as host:port or URL; each request gets spans for itself, queue, prefill, "
        "decode and preemptions. OTEL_* variables also apply (sampling, service name, headers)",
    )
    log_format: str = option("text", "log format: text, or one JSON object per line", choices=get_args(LogFormat))
    enable_log_requests: bool = option(
        False, "log a line per finished request: client, duration, token counts and status, never its text"
    )


@dataclass(frozen=True, slots=True)
class KVEventsOptions:
    """Publication of KV cache events."""

    kv_events_endpoint: str | None = option(
        None,
        "ZeroMQ address, such as tcp://*:5557, for KV cache events in vLLM's format (blocks stored and removed); "
        "each replica uses its own port, counted from this one. Events contain prompt tokens, readable by anyone "
        "who can connect; off if unset",
    )
    kv_events_replay_endpoint: str | None = option(
        None, "ZeroMQ address, such as tcp://*:5558, that replays missed KV cache events; off if unset"
    )
    kv_events_topic: str = option("", "topic prefix of KV cache event messages, for filtered subscriptions")
    kv_events_buffer: int = option(
        10_000, "steps of KV cache events to keep for replay, and maximum backlog of unsent ones", low=1, high=1_000_000
    )

    def check(self) -> None:
        """Reject conflicting options and invalid addresses; raise InvalidArgument."""
        for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
            address = getattr(self, name)
            if address is not None:
                _check_address(name, address)
        if self.kv_events_endpoint is None and self.kv_events_replay_endpoint is not None:
            raise InvalidArgument("kv_events_replay_endpoint", "requires kv_events_endpoint")
        if self.kv_events_endpoint is not None and self.kv_events_endpoint == self.kv_events_replay_endpoint:
            raise InvalidArgument("kv_events_replay_endpoint", f"{self.kv_events_endpoint} is also kv_events_endpoint")


def _check_address(name: str, address: str) -> None:
    """Check that a ZeroMQ address can be bound.

    Raises:
        InvalidArgument: it is malformed.
    """
    kind, found, rest = address.partition("://")
    if kind == "ipc" and rest:
        return
    host, colon, port = rest.rpartition(":")
    if not (found and kind == "tcp" and colon and host and port.isdecimal() and 1 <= int(port) <= 65535):
        raise InvalidArgument(
            name, f"{address!r} is neither tcp://ADDRESS:PORT, with * for every interface, nor ipc://PATH"
        )


@dataclass(frozen=True, slots=True)
class TimeoutOptions:
    """Timeouts of requests, and of an engine without progress."""

    default_deadline: float | None = option(
        None, "deadline of requests that set none; unlimited if unset", low=0.001, high=1e7, unit="s"
    )
    max_deadline: float | None = option(
        None,
        "maximum deadline of any request; unlimited if unset",
        low=0.001,
        high=1e7,
        unit="s",
    )
    queue_timeout: float | None = option(
        None,
        "maximum wait for the first step; later the request is refused with RESOURCE_EXHAUSTED; unlimited if unset",
        low=0.001,
        high=1e7,
        unit="s",
    )
    refuse_late: bool = option(
        True,
        "refuse a request immediately with DEADLINE_EXCEEDED if it could not finish in time even at the fastest "
        "measured step times",
    )
    stall_timeout: float = option(
        30.0,
        "time without a completed step, with work pending, after which health reports NOT_SERVING until steps "
        "complete again",
        low=0.05,
        high=1e7,
        unit="s",
    )
    step_timeout: float = option(
        300.0,
        "step duration after which the engine counts as hung: open calls fail with UNAVAILABLE, all thread stacks "
        "go to stderr, and the process exits with code 3; 0 waits forever",
        low=0.0,
        high=1e7,
        unit="s",
    )

    def check(self) -> None:
        """Check the timeouts against each other.

        Raises:
            InvalidArgument: one exceeds another.
        """
        default_s, most_s = self.default_deadline, self.max_deadline
        if default_s is not None and most_s is not None and default_s > most_s:
            raise InvalidArgument("default_deadline", f"{default_s:g} s is above max_deadline ({most_s:g} s)")
        if 0 < self.step_timeout < self.stall_timeout:
            raise InvalidArgument(
                "step_timeout", f"{self.step_timeout:g} s is below stall_timeout ({self.stall_timeout:g} s)"
            )


Role = Literal["both", "prefill", "decode"]
"""Role of a server."""
PrefillPolicy = Literal["auto", "always"]
"""Rule for the prompts that a decode server sends to prefill servers."""


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
    prefill_policy: PrefillPolicy = option(
        "auto",
        "prompts that a decode server sends to prefill servers; auto: those whose KV blocks arrive sooner than this "
        "server computes them, by measured rates; always: all of at least prefill_min_tokens",
        choices=get_args(PrefillPolicy),
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
        if (port := cache.data_port) is not None:
            port.check(self.role)
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
