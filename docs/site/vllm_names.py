"""The tables of vLLM's HTTP paths and metrics in docs/from_vllm.md: `python -m docs.site.vllm_names` writes them."""

import asyncio
import re
from collections.abc import Collection, Iterator, Mapping

from docs.site.links import ROOT
from jpaged.access.authenticator import HTTP
from jpaged.http.app import INSTEAD
from jpaged.server_load import PER_POSITION, SpeculationLoad, get_metrics
from tests.deploy.metrics import scrape

PAGE = ROOT / "docs" / "from_vllm.md"
VERSION = "0.33"
PATHS = """
    /v1/completions /v1/chat/completions /v1/responses /v1/embeddings /v1/score /score /v1/rerank /v2/rerank /rerank
    /v1/models /tokenize /detokenize /tokenizer_info /invocations /health /ping /version /load /server_info /metrics
    /v1/messages /v1/messages/count_tokens /v1/load_lora_adapter /v1/unload_lora_adapter /reset_prefix_cache
    /reset_mm_cache /reset_encoder_cache /sleep /wake_up /is_sleeping /release_kv_cache_memory /pause /resume /is_paused
    /start_profile /stop_profile /v1/responses/{response_id} /v1/responses/{response_id}/cancel
    /v1/audio/transcriptions /v1/audio/translations /v1/realtime /classify /pooling /v2/embed /cohere/v2/chat
    /v1/chat/completions/batch /v1/chat/completions/render /v1/completions/render /v1/responses/render
    /v1/messages/render /v1/chat/completions/derender /v1/completions/derender /generative_scoring /v1/decisions
    /v1/systemone /inference/v1/generate /inference/v1/abort_requests /abort_requests /collective_rpc
    /scale_elastic_ep /is_scaling_elastic_ep /fault_tolerance/apply /fault_tolerance/status /kv_event_sources
    /init_weight_transfer_engine /start_weight_update /start_draft_weight_update /update_weights
    /finish_weight_update /update_weight_version /shutdown_weight_transfer_engine /weight_checker /weight_info
    /get_world_size
"""
"""HTTP paths of vLLM's server of this version."""
PAGES: Mapping[str, str] = {
    "/v1/chat/completions/batch": "[batches](batches.md)",
    "/inference/v1/generate": "[gRPC](grpc.md)",
    "/kv_event_sources": "[KV events](kv_events.md)",
    "/init_weight_transfer_engine": "[weight updates](weight_updates.md)",
}
"""Pages about the alternatives to paths that are not served."""
PARTLY: Mapping[str, str] = {
    "/classify": "the same, for models with a classification head",
    "/update_weights": (
        "replaces the weights by those of a folder, whose `path` the body has ([weight updates](weight_updates.md))"
    ),
}
"""Paths that only some models serve."""

METRICS = """
    num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries prefix_cache_hits
    num_preemptions prompt_tokens generation_tokens request_success request_prompt_tokens request_generation_tokens
    request_params_n request_params_max_tokens time_to_first_token_seconds inter_token_latency_seconds
    request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds
    request_inference_time_seconds request_prefill_time_seconds request_decode_time_seconds lora_requests_info
    cache_config_info spec_decode_num_drafts spec_decode_num_draft_tokens spec_decode_num_accepted_tokens
    spec_decode_num_accepted_tokens_per_pos num_requests_waiting_by_reason num_requests_kv_fetch_by_stage
    engine_sleep_state corrupted_requests watermark_requests external_prefix_cache_queries
    external_prefix_cache_hits mm_cache_queries mm_cache_hits prompt_tokens_by_source prompt_tokens_cached
    prompt_tokens_cached_by_source admission_rejections iteration_tokens_total request_max_num_generation_tokens
    request_num_preemptions request_prefill_kv_computed_tokens kv_block_lifetime_seconds
    kv_block_idle_before_evict_seconds kv_block_reuse_gap_seconds estimated_flops_per_gpu_total
    estimated_read_bytes_per_gpu_total estimated_write_bytes_per_gpu_total tool_call_parser_invocations_total
    websocket_connections_active websocket_connections_total websocket_connection_duration_seconds kv_offload_*
    kv_offload_tiering_* simple_kv_offload_* nixl_* mooncake_* hf3fs_* hisparse_* umbp_* diffusion_*
"""
"""Metrics of vLLM's server of this version, without `vllm:`; a star stands for those of a connector or feature."""
OURS: Mapping[str, str] = {
    "num_requests_waiting_by_reason num_requests_kv_fetch_by_stage": "`vllm:num_requests_waiting`, one number",
    "corrupted_requests": "`jpaged:nonfinite_requests_total`; these requests end with an error",
    "external_prefix_cache_queries prompt_tokens_by_source": "`vllm:prefix_cache_queries_total`",
    "external_prefix_cache_hits": "`jpaged:external_prefix_hits_total`",
    "prompt_tokens_cached prompt_tokens_cached_by_source": "`vllm:prefix_cache_hits_total`; of it "
    "`jpaged:host_prefix_hits_total`, `jpaged:disk_prefix_hits_total` and `jpaged:external_prefix_hits_total`",
    "admission_rejections": "`vllm:request_success_total` and the audit log do not have them: count statuses (429, "
    "RESOURCE_EXHAUSTED) at clients",
    "iteration_tokens_total": "the rates of `vllm:prompt_tokens_total` and `vllm:generation_tokens_total`, divided by "
    "that of `jpaged:steps_total`",
    "request_max_num_generation_tokens": "`vllm:request_params_max_tokens`",
    "request_num_preemptions": "`vllm:num_preemptions_total`",
    "request_prefill_kv_computed_tokens": "`vllm:prompt_tokens_total` minus `vllm:prefix_cache_hits_total`",
    "kv_offload_* kv_offload_tiering_* simple_kv_offload_*": "`jpaged:blocks_swapped_out_total`, "
    "`jpaged:blocks_swapped_in_total`, `jpaged:disk_blocks` and the other `jpaged:disk_*`",
    "nixl_* mooncake_* hf3fs_* hisparse_* umbp_*": "`jpaged:external_blocks` and the other `jpaged:external_*`",
    "engine_sleep_state": "the same, with `--enable-sleep-mode`",
    "mm_cache_queries mm_cache_hits": "the same, of encoded images, with a model that reads images",
    "watermark_requests kv_block_lifetime_seconds "
    "kv_block_idle_before_evict_seconds kv_block_reuse_gap_seconds estimated_flops_per_gpu_total "
    "estimated_read_bytes_per_gpu_total estimated_write_bytes_per_gpu_total tool_call_parser_invocations_total "
    "websocket_connections_active websocket_connections_total websocket_connection_duration_seconds "
    "diffusion_*": "none",
}
"""What to use for metrics that are not exported."""


def exported(scraped: str) -> set[str]:
    """Return the names of a server's metrics, without `_total` of counters, from a scrape."""
    names = set(re.findall(r"^# TYPE (\S+) ", scraped, re.MULTILINE))
    names |= {metric.name for _, metric in get_metrics("counter", SpeculationLoad)} | {PER_POSITION.name}
    return names | {name.removesuffix("_total") for name in names}


def _row(names: Collection[str], cell: str) -> str:
    return f"| {', '.join(f'`{name}`' for name in names)} | {cell} |"


def _paths() -> Iterator[str]:
    served = {path.replace(":path", "") for _, path in HTTP}
    yield f"\n| path of vLLM {VERSION} | here |\n|---|---|"
    yield _row([path for path in PATHS.split() if path in served - PARTLY.keys()], "the same")
    for path, text in PARTLY.items():
        yield _row([path], text)
    for paths, text in INSTEAD.items():
        listed = [path for path in paths.split() if path in PATHS.split()]
        pages = [f" ({page})" for path, page in PAGES.items() if path in listed]
        if listed:
            yield _row(listed, text + "".join(pages))
    yield ""


def _metrics(scraped: str) -> Iterator[str]:
    names = exported(scraped)
    yield f"\n| metric of vLLM {VERSION} | here |\n|---|---|"
    yield _row([f"vllm:{name}" for name in METRICS.split() if f"vllm:{name}" in names], "the same")
    for group, text in OURS.items():
        if left := [f"vllm:{name}" for name in group.split() if f"vllm:{name}" not in names]:
            yield _row(left, text)
    yield ""


def page(scraped: str) -> str:
    """Return docs/from_vllm.md with current tables."""
    text = PAGE.read_text(encoding="utf-8")
    for name, lines in {"paths": _paths(), "metrics": _metrics(scraped)}.items():
        begin, end = f"<!-- {name}: python -m docs.site.vllm_names -->\n", f"<!-- end of {name} -->\n"
        text = text.partition(begin)[0] + begin + "\n".join(lines) + "\n" + end + text.partition(end)[2]
    return text


if __name__ == "__main__":
    PAGE.write_text(page(asyncio.run(scrape())), encoding="utf-8")
