"""Sections used only by a server: names, ports, access, telemetry. An in-process engine ignores them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from jpaged.config.option import option
from jpaged.errors import InvalidArgument

LogFormat = Literal["text", "json"]


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Served name, ports, and shutdown."""

    served_model_name: str | None = option(None, "the name that clients see; the model's own when left out")
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 is every interface")
    port: int = option(50051, "port to listen on; 0 picks a free one", low=0, high=65535)
    max_request_size: float = option(
        1.0,
        "the largest message from a client; prompts of 131072 tokens, as text or ids, have half of it. It is read on "
        "the thread that serves every stream, which takes 40 ms a MiB at worst",
        low=0.0625,
        high=64.0,
        unit="MiB",
    )
    max_connections: int = option(
        512,
        "connections at one time, and half as many as the process may have open files at most; further ones are closed",
        low=1,
        high=1 << 20,
    )
    connection_idle_timeout: float = option(
        300.0, "a connection without a call is closed after so long", low=0.1, high=86400.0, unit="s"
    )
    max_messages_per_second: int | None = option(
        None,
        "messages that all streams together are sent in a second: where there would be more, several tokens of a "
        "stream go in one. No token waits longer than 0.1 s for that, and a stream's first and last not at all. A "
        "message takes 0.1 ms of a processor, which on CPUs is the model's",
        low=1,
        high=1_000_000,
        by_platform={"cpu": 500, "gpu": 5000, "tpu": 5000},
    )
    shutdown_timeout: float = option(
        30.0, "after SIGTERM, running requests may take so long to finish", low=0.0, high=86400.0, unit="s"
    )
    enable_reflection: bool = option(True, "serve grpc.reflection, for grpcurl and the like")
    enable_open_inference: bool = option(
        True, "serve inference.GRPCInferenceService, which clients of KServe and Triton speak"
    )
    enable_vllm_engine: bool = option(True, "serve vllm.grpc.engine.VllmEngine, which gateways speak")
    disable_control: bool = option(
        False,
        "answer Abort, PinPrefix, LoadAdapter and what undoes them with PERMISSION_DENIED",
    )
    isolate_tenants: bool = option(
        True,
        "tenants (request metadata x-jpaged-tenant) share no cached prefix, no name of a pinned one and no request id; "
        "off, the tenant counts for the policy fair alone",
    )
    max_pinned_blocks: int | None = option(
        None,
        "blocks that pinned prefixes may hold, in the pool of each replica; a quarter of it, as far as a request of "
        "max_model_len can do with the rest, when left out",
        low=0,
    )
    pin_prefix: str | None = option(
        None,
        "a text file: prompts that begin with its text, as it stands there, always find it computed",
        path="file",
    )
    metrics_port: int | None = option(
        None,
        "port that answers Prometheus, on the same host; 0 picks a free one, none when left out",
        low=0,
        high=65535,
    )
    probe_port: int | None = option(
        None,
        "port that answers grpc.health.v1 and nothing else, on the same host, without encryption or tokens; of several "
        "processes each has one. 0 picks a free one, none when left out",
        low=0,
        high=65535,
    )


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """The HTTP frontend."""

    http_port: int | None = option(
        None,
        "port of OpenAI's HTTP API, on the same host; 0 picks a free one, none when left out",
        low=0,
        high=65535,
    )
    http_keep_alive: float = option(
        15.0,
        "a stream of which nothing came for so long is sent a comment, so that proxies do not take it for dead",
        low=0.05,
        high=3600.0,
        unit="s",
    )
    max_response_size: float = option(
        128.0,
        "largest answer over HTTP and largest line of a batch's output, as estimated before it is computed: a request "
        "whose log-probabilities or vectors would make a larger one is refused. A request in flight holds up to three "
        "times as much",
        low=0.0625,
        high=65536.0,
        unit="MiB",
    )
    http_cors_origins: tuple[str, ...] = option(
        (), "origins of pages whose scripts may ask, as https://example.com; * is every one, none when left out"
    )
    batch_dir: str | None = option(
        None,
        "folder for the files and the state of /v1/batches, which go on where they were when a server starts again; "
        "one server has it at a time; there are no batches when left out",
        path="new folder",
    )
    max_batch_file_size: float = option(
        200.0, "the largest file of a batch's requests", low=0.0625, high=65536.0, unit="MiB"
    )
    max_batch_lines: int = option(50_000, "requests of one batch", low=1, high=10_000_000)
    max_batch_storage: float = option(
        10.0, "all files of batches together, of requests and of answers", low=0.001, high=1 << 20, unit="GiB"
    )
    tenant_batch_share: float = option(
        0.5,
        "what one tenant may have of the uploads, files, bytes and batches in progress that other tenants leave "
        "(default: half); all of them with isolate_tenants off",
        low=0.01,
        high=1.0,
    )


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """Authentication, limits, audit and TLS."""

    api_keys: str | None = option(
        None,
        "a TOML file of keys, read again when it changes: every call but those for health brings one of them, as "
        "`authorization: Bearer KEY`, and belongs to its tenant; anybody may ask when left out (docs/access.md)",
        path="file",
    )
    public_metrics: bool = option(False, "with api_keys: /metrics and /version of the HTTP port need no key")
    public_page: bool = option(
        True, "with api_keys: the page of the HTTP port, which shows the pool and no text, needs no key to look at"
    )
    tenant_requests_per_minute: int | None = option(
        None,
        "calls that a tenant may make in a minute; any number when left out, and api_keys may say otherwise",
        low=1,
    )
    tenant_tokens_per_minute: int | None = option(
        None,
        "tokens that a tenant may have in a minute, of prompts and of what is generated; api_keys may say otherwise",
        low=1,
    )
    tenant_max_streams: int | None = option(
        None, "calls of a tenant that may be open at one time; api_keys may say otherwise", low=1
    )
    tenant_max_n: int | None = option(
        None, "sequences that a tenant's request may have (n, best_of, beams); api_keys may say otherwise", low=1
    )
    tenant_max_prompt_tokens: int | None = option(
        None, "tokens that a tenant's prompt may have; api_keys may say otherwise", low=1
    )
    audit_log: str | None = option(
        None,
        "a file to which a line of JSON is appended for each call: who, when, what, how much and how it ended, and "
        "never a prompt or an answer; opened again when it is moved away",
        path="new file",
    )
    tls_cert: str | None = option(
        None,
        "the server's certificate and those that lead from it to one that clients know, in PEM: all ports but that of "
        "metrics speak TLS; read again when it changes",
        path="file",
    )
    tls_key: str | None = option(None, "the private key of tls_cert, in PEM and not encrypted", path="file")
    tls_client_ca: str | None = option(
        None, "certificates in PEM: a client has to show one that is signed by one of them (mutual TLS)", path="file"
    )

    control_port: int | None = option(
        None,
        "port on which alone prefixes are pinned and adapters loaded; 0 picks a free one, and the other ports take "
        "that too when left out",
        low=0,
        high=65535,
    )
    control_host: str = option("127.0.0.1", "address of control_port")
    prefix_peers: tuple[str, ...] = option(
        (),
        "servers, as HOST:PORT, whose cached prefixes FetchPrefix may take over, with the key of its caller; none when "
        "left out",
    )
    prefix_peer_ca: str | None = option(
        None,
        "certificates in PEM that those of prefix_peers lead to, which are shown tls_cert; without it they are "
        "connected to in clear",
        path="file",
    )

    def check(self) -> None:
        """Reject conflicting options; raise InvalidArgument."""
        if (self.tls_cert is None) != (self.tls_key is None):
            missing, given = ("tls_cert", "tls_key") if self.tls_cert is None else ("tls_key", "tls_cert")
            raise InvalidArgument(missing, f"is missing: {given} is {getattr(self, given)}, and needs it")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise InvalidArgument("tls_client_ca", f"{self.tls_client_ca} needs tls_cert and tls_key")
        if self.prefix_peer_ca is not None and not self.prefix_peers:
            raise InvalidArgument("prefix_peer_ca", f"{self.prefix_peer_ca} needs prefix_peers")


@dataclass(frozen=True, slots=True)
class TelemetryOptions:
    """Traces and logs."""

    otlp_traces_endpoint: str | None = option(
        None,
        "where traces go: host:port or a URL of a collector that takes OTLP over gRPC; a span each for a request, its "
        "queue, prefill, decode and preemptions. OTEL_* variables hold too (sampling, service name, headers)",
    )
    log_format: str = option("text", "lines of the log: text, or a JSON object each", choices=get_args(LogFormat))
    enable_log_requests: bool = option(
        False, "a line for each request that has ended: whose, how long, how many tokens, which status; never its text"
    )


@dataclass(frozen=True, slots=True)
class KVEventsOptions:
    """Publication of KV cache events."""

    kv_events_endpoint: str | None = option(
        None,
        "ZeroMQ address, as tcp://*:5557, where routers are told which blocks begin and cease to hold which tokens, in "
        "vLLM's format; each replica has a port of its own, counted from this one. It tells prompts, to whoever can "
        "connect; nobody when left out",
    )
    kv_events_replay_endpoint: str | None = option(
        None, "ZeroMQ address, as tcp://*:5558, that answers what somebody has missed; none when left out"
    )
    kv_events_topic: str = option("", "what messages begin with, for those who subscribe to some of them")
    kv_events_buffer: int = option(
        10_000, "steps that are kept for who has missed them, and that may wait to be told", low=1, high=1_000_000
    )

    def check(self) -> None:
        """Reject conflicting options and invalid addresses; raise InvalidArgument."""
        for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
            address = getattr(self, name)
            if address is not None:
                _check_address(name, address)
        if self.kv_events_endpoint is None and self.kv_events_replay_endpoint is not None:
            raise InvalidArgument("kv_events_replay_endpoint", "answers for kv_events_endpoint, which is left out")
        if self.kv_events_endpoint is not None and self.kv_events_endpoint == self.kv_events_replay_endpoint:
            raise InvalidArgument("kv_events_replay_endpoint", f"{self.kv_events_endpoint} is kv_events_endpoint")


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
