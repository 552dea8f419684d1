"""Model, server and load information for gateways. Fields without a counterpart are left at zero."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2

from jpaged.errors import InvalidArgument
from jpaged.load import EngineLoad
from jpaged.service.loaded_model import LoadedModel, ServiceState
from jpaged.version import __version__

SERVER_TYPE = "jpaged-grpc"
SECTIONS = ("core", "all", "memory", "spec", "lora", "disagg", "queues")
"""Sections of a load that gateways request; these messages have only the first."""
_MIN_WINDOW_S = 1.0


def model_info_of(model: LoadedModel) -> vllm_engine_pb2.GetModelInfoResponse:
    """Return the model's properties, fixed at startup."""
    info, source = model.model, model.config.model.model
    return vllm_engine_pb2.GetModelInfoResponse(
        model_path=source,
        is_generation=True,
        max_context_length=info.max_model_len,
        vocab_size=info.vocab_size,
        served_model_name=info.name,
        tokenizer_path=source,
        architectures=[info.architecture],
        eos_token_ids=info.eos_token_ids,
        max_req_input_len=info.max_model_len - 1,
    )


def server_info_of(
    state: ServiceState, last_receive_s: float, uptime_s: float
) -> vllm_engine_pb2.GetServerInfoResponse:
    """Return the server's properties; most of them only after its model is loaded.

    Args:
        last_receive_s: when the last request came, in seconds since 1970; 0 before the first.
    """
    facts: dict[str, Any] = {
        "last_receive_timestamp": last_receive_s,
        "uptime_seconds": uptime_s,
        "server_type": SERVER_TYPE,
        "data_parallel_size": state.config.parallel.data_parallel_size,
        "constrained_decoding_start": "first_token",
    }
    if (model := state.model) is not None:
        load, geometry = model.engine.load(), model.engine.geometry
        facts |= {
            "active_requests": load.num_running + load.num_waiting,
            "kv_cache_dtype": model.config.cache.kv_cache_dtype,
            "block_size": geometry.block_size,
            "attention_backend": model.backend.attention,
            "model_dtype": model.model.dtype,
            "max_num_seqs": geometry.max_num_seqs,
        }
    return vllm_engine_pb2.GetServerInfoResponse(**facts)


class Loads:
    """State of GetLoads: measures tokens per second between calls, over windows of at least a second."""

    def __init__(self) -> None:
        self._since: tuple[float, list[int]] | None = None
        self._rates: list[float] = []

    def of(self, model: LoadedModel, request: vllm_engine_pb2.GetLoadsRequest) -> vllm_engine_pb2.GetLoadsResponse:
        """Return the load of each replica, or of the requested one.

        Raises:
            InvalidArgument: there is no such replica, or section.
        """
        loads = model.engine.replica_loads()
        for i, name in enumerate(request.include):
            if name not in SECTIONS:
                raise InvalidArgument(f"include[{i}]", f"{name!r} is not one of {', '.join(SECTIONS)}")
        ranks = range(len(loads))
        if request.HasField("dp_rank"):
            if request.dp_rank not in ranks:
                raise InvalidArgument("dp_rank", f"{request.dp_rank} is not from 0 to {len(loads) - 1}")
            ranks = range(request.dp_rank, request.dp_rank + 1)
        self._measure(model.engine.clock(), loads)
        return vllm_engine_pb2.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=__version__,
            dp_rank_count=len(loads),
            loads=[_load_of(rank, loads[rank], self._rates[rank]) for rank in ranks],
        )

    def _measure(self, now_s: float, loads: Sequence[EngineLoad]) -> None:
        counts = [load.num_generation_tokens for load in loads]
        if self._since is None:
            self._since, self._rates = (now_s, counts), [0.0] * len(loads)
        since_s, before = self._since
        if now_s - since_s >= _MIN_WINDOW_S:
            self._rates = [(new - old) / (now_s - since_s) for new, old in zip(counts, before, strict=True)]
            self._since = now_s, counts


def _load_of(rank: int, load: EngineLoad, tokens_per_s: float) -> vllm_engine_pb2.SchedulerLoad:
    return vllm_engine_pb2.SchedulerLoad(
        dp_rank=rank,
        num_running_reqs=load.num_running,
        num_waiting_reqs=load.num_waiting,
        num_total_reqs=load.num_running + load.num_waiting,
        num_used_tokens=load.num_blocks_used * load.block_size,
        max_total_num_tokens=load.num_blocks * load.block_size,
        token_usage=load.num_blocks_used / max(1, load.num_blocks),
        gen_throughput=tokens_per_s,
        cache_hit_rate=load.num_prefix_hit_tokens / max(1, load.num_prefix_query_tokens),
        utilization=load.num_running / max(1, load.max_num_seqs),
        max_running_requests=load.max_num_seqs,
    )
