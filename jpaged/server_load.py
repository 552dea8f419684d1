"""Counters and gauges of a server, each declared once: type, aggregation, metric and help.

    counted     engine/stats.py                      EngineLoad: a snapshot of one engine after a step
    added up    total_load                           over the replicas of a server
    sent        server/servicer.py -> client/convert.py ReplicaLoad and LoadTotals, by the names of the proto's fields
    scraped     telemetry/metrics.py                 everything that has a metric

A new number needs a field here, a field in the proto, and a line of code that counts it. `vllm:*` metrics have vLLM's
meaning, so that dashboards, autoscalers and routers made for vLLM work; `jpaged:*` metrics are specific to jpaged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class Metric:
    """Prometheus metric: the name without the suffix of the kind, and the help."""

    name: str
    help: str


def gauge(metric: Metric | None = None, replica: Metric | None = None) -> Any:
    """Declare a gauge; `replica` is an additional metric per replica."""
    return field(default=0, metadata={"gauge": metric, "replica": replica})


def counter(metric: Metric | None = None) -> Any:
    """Declare a counter."""
    return field(default=0, metadata={"counter": metric})


def shared(metric: Metric, kind: str = "counter") -> Any:
    """Declare a number that replicas share, so that each reports the same value."""
    return field(default=0, metadata={kind: metric, "total": max})


def mean(weight: str, metric: Metric | None = None) -> Any:
    """Declare a mean, weighted by the field `weight`; 0 before the first."""
    return field(default=0.0, metadata={"gauge": metric, "weight": weight})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """Load of one replica.

    Attributes:
        num_blocks_free: free blocks, cached ones included.
    """

    num_running: int = gauge(
        Metric("vllm:num_requests_running", "Requests in the current step."),
        Metric("jpaged:replica_requests_running", "Requests in the current step, per replica."),
    )
    num_waiting: int = gauge(
        Metric("vllm:num_requests_waiting", "Requests waiting for rows or blocks, including preempted ones."),
        Metric("jpaged:replica_requests_waiting", "Requests waiting, including preempted ones, per replica."),
    )
    num_blocks: int = gauge()
    num_blocks_free: int = gauge()
    num_blocks_used: int = gauge(
        Metric("jpaged:blocks_referenced", "KV blocks referenced by sequences or pinned prefixes."),
        Metric(
            "jpaged:replica_blocks_referenced", "KV blocks referenced by sequences or pinned prefixes, per replica."
        ),
    )
    num_blocks_cached: int = gauge(
        Metric("jpaged:blocks_cached", "Free KV blocks that still hold a cached prefix."),
        Metric("jpaged:replica_blocks_cached", "Free KV blocks that still hold a cached prefix, per replica."),
    )
    num_prefix_query_tokens: int = counter(
        Metric("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
    )
    num_prefix_hit_tokens: int = counter(Metric("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache."))
    num_prompt_tokens: int = counter(Metric("vllm:prompt_tokens", "Prompt tokens of admitted requests."))
    num_generation_tokens: int = counter(Metric("vllm:generation_tokens", "Generated tokens."))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTotals(ReplicaLoad):
    """Load of all replicas together. The peak is the sum of the replicas' peaks, an upper bound."""

    max_num_seqs: int = gauge()
    num_swapped: int = gauge(Metric("jpaged:num_requests_swapped", "Requests swapped out to host memory."))
    peak_blocks_used: int = gauge()
    slot_use: float = mean(
        "sum_reserved_slots",
        Metric("jpaged:slot_use_ratio", "Fraction of reserved KV slots that held a token, over all steps."),
    )
    num_steps: int = counter(Metric("jpaged:steps", "Steps dispatched."))
    num_preemptions: int = counter(Metric("vllm:num_preemptions", "Preemptions of requests."))
    num_recomputed_tokens: int = counter(Metric("jpaged:recomputed_tokens", "Tokens recomputed after preemptions."))
    num_copies_on_write: int = counter(
        Metric("jpaged:copies_on_write", "Shared KV blocks copied because a sequence wrote to them (copy on write).")
    )
    num_blocks_swapped_out: int = counter(
        Metric(
            "jpaged:blocks_swapped_out", "KV blocks swapped out to host memory, excluding those on their way to disk."
        )
    )
    num_blocks_swapped_in: int = counter(Metric("jpaged:blocks_swapped_in", "KV blocks swapped in from host memory."))
    num_host_hit_tokens: int = counter(
        Metric("jpaged:host_prefix_hits", "Prefix cache hit tokens loaded from host memory.")
    )
    num_disk_hit_tokens: int = counter(
        Metric("jpaged:disk_prefix_hits", "Prompt tokens loaded from disk for a request's prefix cache lookup.")
    )
    num_disk_blocks: int = shared(Metric("jpaged:disk_blocks", "KV blocks stored on disk."), "gauge")
    disk_bytes_read: int = shared(Metric("jpaged:disk_read_bytes", "KV block bytes read from disk."))
    disk_bytes_written: int = shared(Metric("jpaged:disk_written_bytes", "KV block bytes written to disk."))
    num_disk_blocks_dropped: int = shared(
        Metric(
            "jpaged:disk_blocks_dropped",
            "KV blocks dropped from disk because their content did not match their hash.",
        )
    )
    num_cascade_steps: int = counter(
        Metric(
            "jpaged:cascade_steps", "Steps that used cascade attention (a shared prefix read once for several rows)."
        )
    )
    num_cascade_tokens: int = counter(
        Metric("jpaged:cascade_tokens", "Context tokens that rows did not read again thanks to cascade attention.")
    )
    num_nonfinite_requests: int = counter(
        Metric("jpaged:nonfinite_requests", "Requests aborted because the model's logits were not finite.")
    )
    num_compiles_after_warm_up: int = counter(
        Metric("jpaged:compiles_after_warm_up", "Programs compiled while serving; anything but 0 is a bug.")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Load(LoadTotals):
    """Response of GetLoad: all replicas together, and each."""

    replicas: tuple[ReplicaLoad, ...]


PER_POSITION = Metric("vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by position.")
"""A counter for each position, from 0, in the label `position`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationLoad:
    """Speculative decoding since the start, under vLLM's names.

        acceptance rate     num_accepted_tokens / num_draft_tokens
        tokens of a step    1 + num_accepted_tokens / num_drafts, including the sampled token after the draft
        of a position       num_accepted_tokens_per_pos[i] / num_drafts

    Names and meanings: https://docs.vllm.ai/en/latest/design/metrics/ and
    https://github.com/vllm-project/vllm/blob/main/vllm/v1/spec_decode/metrics.py.

    Attributes:
        num_accepted_tokens_per_pos: accepted draft tokens by their position in a draft.
    """

    num_drafts: int = counter(Metric("vllm:spec_decode_num_drafts", "Drafts verified."))
    num_draft_tokens: int = counter(Metric("vllm:spec_decode_num_draft_tokens", "Draft tokens proposed."))
    num_accepted_tokens: int = counter(Metric("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted."))
    num_accepted_tokens_per_pos: tuple[int, ...] = ()

    @classmethod
    def total(cls, loads: Sequence[SpeculationLoad]) -> SpeculationLoad:
        """Return the total of several engines; missing positions count as 0."""
        width = max((len(load.num_accepted_tokens_per_pos) for load in loads), default=0)
        places = [load.num_accepted_tokens_per_pos for load in loads]
        return cls(
            num_drafts=sum(load.num_drafts for load in loads),
            num_draft_tokens=sum(load.num_draft_tokens for load in loads),
            num_accepted_tokens=sum(load.num_accepted_tokens for load in loads),
            num_accepted_tokens_per_pos=tuple(
                sum(counts[i] for counts in places if i < len(counts)) for i in range(width)
            ),
        )

    @property
    def acceptance_rate(self) -> float:
        """Share of draft tokens that were accepted; 0 before the first."""
        return self.num_accepted_tokens / max(1, self.num_draft_tokens)

    @property
    def mean_acceptance_len(self) -> float:
        """Mean tokens per step of a row with a draft, including the sampled token after it; 1 before the first."""
        return 1 + self.num_accepted_tokens / max(1, self.num_drafts)


def _union(names: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(sorted(set().union(*names)))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad(LoadTotals):
    """Load of an engine, and its counters since the start.

    Attributes:
        block_size: token slots in a block, equal in all replicas.
        num_blocks_empty: free blocks without the cached ones.
        sum_reserved_slots: reserved slots, summed over all steps so far.
        num_first_tokens: requests that have a first token.
        time_to_first_token_s: mean time to first token.
        running_adapters: names of the adapters of running requests; waiting_adapters likewise.
        host_s: host time for scheduling, packing and publishing steps.
        num_expert_load_reads: times that the load of experts was read (`--enable-eplb`).
        device_idle_s: time from a step's results to the next forward, while there were requests to run.
        seconds_since_progress: time without a completed step while there are requests; the maximum of several engines.
        num_stalls: times that this exceeded `stall_timeout`.
    """

    block_size: int = field(metadata={"is_alike": True})
    num_blocks_empty: int = gauge(Metric("jpaged:blocks_free", "Free KV blocks without a cached prefix."))
    num_state_slots: int = gauge(
        Metric("jpaged:state_slots", "Slots for recurrent state, of running sequences and checkpoints.")
    )
    num_state_checkpoints: int = gauge(
        Metric("jpaged:state_checkpoints", "Slots that hold a checkpoint of recurrent state for the prefix cache.")
    )
    num_requests_ended: int = counter()
    num_forced_tokens: int = counter(
        Metric("jpaged:forced_tokens", "Tokens forced by a grammar, without a model step (jump-forward decoding).")
    )
    sum_reserved_slots: int = counter()
    num_first_tokens: int = counter()
    time_to_first_token_s: float = mean("num_first_tokens")
    running_adapters: tuple[str, ...] = field(default=(), metadata={"total": _union})
    waiting_adapters: tuple[str, ...] = field(default=(), metadata={"total": _union})
    speculation: SpeculationLoad = field(default_factory=SpeculationLoad, metadata={"total": SpeculationLoad.total})
    host_s: float = counter(
        Metric("jpaged:host_seconds", "Host seconds spent scheduling, packing inputs and publishing outputs of steps.")
    )
    seconds_since_progress: float = field(
        default=0.0,
        metadata={
            "total": max,
            "gauge": Metric(
                "jpaged:seconds_since_progress", "Seconds since the last completed step while requests are pending."
            ),
        },
    )
    num_stalls: int = counter(
        Metric("jpaged:stalls", "Stalls: times that no step completed for --stall-timeout with requests pending.")
    )
    num_expert_load_reads: int = counter()
    expert_balancedness: float = mean(
        "num_expert_load_reads",
        Metric(
            "jpaged:expert_balancedness_ratio",
            "Mean expert load of a device divided by that of the busiest device, when the load was read last.",
        ),
    )
    expert_peak_ratio: float = mean(
        "num_expert_load_reads",
        Metric(
            "jpaged:expert_peak_ratio",
            "Load of a layer's busiest expert divided by the mean of its experts, averaged over layers.",
        ),
    )
    num_expert_rearrangements: int = counter(
        Metric("jpaged:expert_rearrangements", "Changes of the places of experts (--enable-eplb).")
    )
    num_experts_moved: int = counter(
        Metric("jpaged:experts_moved", "Physical experts that got other contents, summed over layers (--enable-eplb).")
    )
    num_kv_events: int = counter(
        Metric("jpaged:kv_events", "KV cache events published, in blocks stored or removed (--kv-events-endpoint).")
    )
    num_kv_events_dropped: int = counter(
        Metric("jpaged:kv_events_dropped", "KV cache events dropped, in blocks stored or removed.")
    )
    disk_is_on: int = shared(Metric("jpaged:disk_on", "1 if disk offload is on, 0 if it is off."), "gauge")
    num_disk_fallbacks: int = counter(
        Metric(
            "jpaged:disk_fallbacks",
            "Requests that recomputed blocks because disk did not deliver them, or not in time.",
        )
    )
    num_disk_blocks_read: int = shared(Metric("jpaged:disk_blocks_read", "KV blocks read from disk."))
    num_disk_blocks_written: int = shared(Metric("jpaged:disk_blocks_written", "KV blocks written to disk."))
    num_disk_blocks_evicted: int = shared(Metric("jpaged:disk_blocks_evicted", "KV blocks evicted from disk."))
    num_disk_failures: int = shared(
        Metric("jpaged:disk_failures", "Disk errors; the first one turns disk offload off.")
    )
    disk_read_s: float = shared(
        Metric("jpaged:disk_read_seconds", "Seconds spent reading from disk, summed over threads.")
    )
    disk_write_s: float = shared(Metric("jpaged:disk_write_seconds", "Seconds spent writing to disk."))
    external_is_on: int = shared(Metric("jpaged:external_on", "1 if a KV connector is on, 0 if it is off."), "gauge")
    num_external_hit_tokens: int = counter(
        Metric("jpaged:external_prefix_hits", "Prompt tokens loaded by a KV connector for a prefix cache lookup.")
    )
    num_external_fallbacks: int = counter(
        Metric(
            "jpaged:external_fallbacks",
            "Requests that recomputed blocks because the KV connector did not deliver them, or not in time.",
        )
    )
    num_external_blocks: int = shared(Metric("jpaged:external_blocks", "KV blocks stored by a KV connector."), "gauge")
    num_external_blocks_read: int = shared(Metric("jpaged:external_blocks_read", "KV blocks loaded by a KV connector."))
    num_external_blocks_written: int = shared(
        Metric("jpaged:external_blocks_written", "KV blocks saved by a KV connector.")
    )
    external_bytes_read: int = shared(Metric("jpaged:external_read_bytes", "KV block bytes loaded by a KV connector."))
    external_bytes_written: int = shared(
        Metric("jpaged:external_written_bytes", "KV block bytes saved by a KV connector.")
    )
    external_read_s: float = shared(
        Metric("jpaged:external_read_seconds", "Seconds spent loading by a KV connector, summed over threads.")
    )
    external_write_s: float = shared(
        Metric("jpaged:external_write_seconds", "Seconds spent saving by a KV connector, summed over threads.")
    )
    num_external_blocks_dropped: int = shared(
        Metric(
            "jpaged:external_blocks_dropped",
            "KV blocks of a KV connector dropped because their content did not match their checksum.",
        )
    )
    num_external_blocks_evicted: int = shared(
        Metric("jpaged:external_blocks_evicted", "KV blocks that a KV connector removed by itself.")
    )
    num_external_failures: int = shared(
        Metric("jpaged:external_failures", "Errors of a KV connector; the first one turns it off.")
    )
    device_idle_s: float = counter(
        Metric("jpaged:device_idle_seconds", "Seconds the device was idle between steps while requests were running.")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLoad:
    """Counters of images, of a model that reads them."""

    num_tokens: int = counter(Metric("jpaged:image_prompt_tokens", "Prompt tokens of images."))
    num_queries: int = counter(Metric("vllm:mm_cache_queries", "Images looked up among the encoded ones."))
    num_hits: int = counter(Metric("vllm:mm_cache_hits", "Images found among the encoded ones."))
    num_encoded: int = counter(Metric("jpaged:images_encoded", "Images that the vision encoder has encoded."))
    num_calls: int = counter(Metric("jpaged:image_encoder_calls", "Calls of the vision encoder."))
    cached_bytes: int = gauge(Metric("jpaged:image_cache_bytes", "Host memory of encoded images, in bytes."))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleLoad:
    """Counters of disaggregated prefill since the start, of a prefill or decode server.

    Attributes:
        num_asked: prompts that a decode server sent to prefill servers.
        prefill_wait_s: time from sending prompts to their first tokens.
        transfer_wait_s: time from first tokens to the last transferred block.
        num_blocks_missing: blocks that did not arrive although there was room.
        num_blocks_without_room: blocks without room in host memory.
        pull_s: time of pulls from data ports, from offers to blocks in the cache.
    """

    num_asked: int = counter(Metric("jpaged:prefills_asked", "Prompts sent to prefill servers."))
    prefill_wait_s: float = counter(
        Metric("jpaged:prefill_wait_seconds", "Seconds spent waiting for first tokens from prefill servers.")
    )
    transfer_wait_s: float = counter(
        Metric("jpaged:transfer_wait_seconds", "Seconds spent waiting for prompt blocks after first tokens.")
    )
    num_blocks_received: int = counter(Metric("jpaged:blocks_received", "KV blocks received from prefill servers."))
    num_bytes_received: int = counter(Metric("jpaged:bytes_received", "KV block bytes received from prefill servers."))
    num_blocks_missing: int = counter(
        Metric("jpaged:blocks_missing", "KV blocks not received from prefill servers and recomputed.")
    )
    num_blocks_without_room: int = counter(
        Metric("jpaged:blocks_without_room", "KV blocks of prompts not received because host memory was full.")
    )
    num_pulls: int = counter(Metric("jpaged:pulls", "Offers of KV blocks pulled from data ports."))
    num_bytes_pulled: int = counter(Metric("jpaged:bytes_pulled", "KV block bytes pulled from data ports."))
    pull_s: float = counter(Metric("jpaged:pull_seconds", "Seconds spent pulling KV blocks from data ports."))
    num_pulls_failed: int = counter(
        Metric("jpaged:pulls_failed", "Pulls from data ports that failed, after which blocks were sent over gRPC.")
    )
    num_prefills_for_others: int = counter(Metric("jpaged:prefills_for_others", "Prompts computed for decode servers."))
    num_blocks_sent: int = counter(Metric("jpaged:blocks_sent", "KV blocks sent to decode servers."))
    num_bytes_sent: int = counter(Metric("jpaged:bytes_sent", "KV block bytes sent to decode servers."))
    num_holds_expired: int = counter(
        Metric("jpaged:prefill_holds_expired", "Prompts whose blocks were released before decode servers fetched them.")
    )


PREFILLS_HERE = Metric(
    "jpaged:prefills_here", "Prompts that a decode server computed itself without a remote prefill, by reason."
)
PREFILL_FAILURES = Metric(
    "jpaged:prefill_failures", "Prompts recomputed locally after a remote prefill failed, by reason."
)
"""Counters by reason, in the label `reason`."""
IGNORED_FIELDS = Metric(
    "jpaged:ignored_request_fields", "HTTP requests with an unknown field, which was ignored, by field."
)


def get_metrics(kind: str, load: type = EngineLoad) -> list[tuple[str, Metric]]:
    """Return the fields of a load that have a metric of a kind ("gauge", "counter" or "replica"), with the metric."""
    return [(one.name, one.metadata[kind]) for one in fields(load) if one.metadata.get(kind)]


def total_load(loads: Sequence[EngineLoad]) -> EngineLoad:
    """Return the combined load of several engines: numbers are added, means weighted."""
    return EngineLoad(**{one.name: _total(one, loads) for one in fields(EngineLoad)})


def _total(one: Field[Any], loads: Sequence[EngineLoad]) -> Any:
    values = [getattr(load, one.name) for load in loads]
    if one.metadata.get("is_alike"):
        return values[0]
    if "total" in one.metadata:
        return one.metadata["total"](values)
    if "weight" not in one.metadata:
        return sum(values)
    weights = [getattr(load, one.metadata["weight"]) for load in loads]
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / max(1, sum(weights))


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram of seconds, or of counts.

    Attributes:
        bounds: upper bounds of the buckets; vLLM's if it has the histogram, so that one query can combine both.
    """

    metric: Metric
    bounds: tuple[float, ...]


_REQUEST_BOUNDS_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_TOKEN_BOUNDS = tuple(float(first * 10**power) for power in range(7) for first in (1, 2, 5))
DISTRIBUTIONS: Mapping[str, Distribution] = MappingProxyType(
    {
        "time_to_first_token": Distribution(
            Metric("vllm:time_to_first_token_seconds", "Seconds from arrival to the first token."),
            (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0,
             2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
        ),
        "inter_token": Distribution(
            Metric("vllm:inter_token_latency_seconds", "Seconds between consecutive tokens of a sequence."),
            (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0,
             2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
        ),
        "end_to_end": Distribution(
            Metric("vllm:e2e_request_latency_seconds", "Seconds from arrival to the end of finished requests."),
            _REQUEST_BOUNDS_S,
        ),
        "queue_time": Distribution(
            Metric("vllm:request_queue_time_seconds", "Seconds from arrival to the first step."), _REQUEST_BOUNDS_S
        ),
        "prefill_time": Distribution(
            Metric("vllm:request_prefill_time_seconds", "Seconds from the first step to the first token."),
            _REQUEST_BOUNDS_S,
        ),
        "decode_time": Distribution(
            Metric("vllm:request_decode_time_seconds", "Seconds from the first token to the last token."),
            _REQUEST_BOUNDS_S,
        ),
        "inference_time": Distribution(
            Metric("vllm:request_inference_time_seconds", "Seconds from the first step to the last token."),
            _REQUEST_BOUNDS_S,
        ),
        "time_per_token": Distribution(
            Metric("vllm:request_time_per_output_token_seconds", "Mean seconds per output token after the first, "
                                                                 "per request."),
            (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0,
             2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
        ),
        "request_prompt_tokens": Distribution(
            Metric("vllm:request_prompt_tokens", "Prompt tokens of finished requests."), _TOKEN_BOUNDS
        ),
        "request_generation_tokens": Distribution(
            Metric("vllm:request_generation_tokens", "Generated tokens of finished requests."), _TOKEN_BOUNDS
        ),
        "request_max_tokens": Distribution(
            Metric("vllm:request_params_max_tokens", "max_tokens of finished requests."), _TOKEN_BOUNDS
        ),
        "request_n": Distribution(
            Metric("vllm:request_params_n", "n of finished requests."), (1.0, 2.0, 5.0, 10.0, 20.0)
        ),
        "host_step": Distribution(
            Metric("jpaged:host_step_seconds", "Host seconds per step."),
            (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 1.0),
        ),
    }
)  # fmt: skip
"""The histograms, by the names under which they are observed."""
