"""Every metric moves when what it counts happens: engines over the fake executor, scraped over HTTP."""

import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jpaged.config import EngineConfig
from jpaged.engine.engine import Engine
from jpaged.engine.stats import Histogram
from jpaged.errors import InvalidArgument
from jpaged.server_load import DISTRIBUTIONS, get_metrics
from jpaged.service.input_processor import InputProcessor
from jpaged.service.loaded_model import LoadedModel
from jpaged.telemetry.metrics import serve_metrics
from jpaged.testing import ByteTokenizer, FakeAdapter, FakeExecutor, VirtualClock, with_adapters
from jpaged.types import LoadedAdapter, OutputEvent, Request, SamplingParams
from tests.server.harness import BACKEND, MODEL, running

NAMES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:cache_config_info",
    "vllm:lora_requests_info",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_inference_time_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_params_max_tokens",
    "vllm:request_params_n",
    "jpaged:num_requests_swapped",
    "jpaged:blocks_free",
    "jpaged:pool_limit_blocks",
    "jpaged:blocks_cached",
    "jpaged:blocks_referenced",
    "jpaged:state_checkpoints",
    "jpaged:state_slots",
    "jpaged:slot_use_ratio",
    "jpaged:replica_requests_running",
    "jpaged:replica_requests_waiting",
    "jpaged:replica_blocks_cached",
    "jpaged:replica_blocks_referenced",
    "jpaged:copies_on_write_total",
    "jpaged:blocks_swapped_out_total",
    "jpaged:blocks_swapped_in_total",
    "jpaged:recomputed_tokens_total",
    *("jpaged:host_prefix_hits_total", "jpaged:disk_prefix_hits_total", "jpaged:disk_blocks", "jpaged:disk_on"),
    *("jpaged:disk_read_bytes_total", "jpaged:disk_written_bytes_total", "jpaged:disk_blocks_dropped_total"),
    *("jpaged:disk_blocks_read_total", "jpaged:disk_blocks_written_total", "jpaged:disk_blocks_evicted_total"),
    *("jpaged:disk_failures_total", "jpaged:disk_read_seconds_total", "jpaged:disk_write_seconds_total"),
    "jpaged:disk_fallbacks_total",
    "jpaged:cascade_steps_total",
    "jpaged:cascade_tokens_total",
    "jpaged:forced_tokens_total",
    "jpaged:nonfinite_requests_total",
    "jpaged:compiles_after_warm_up_total",
    "jpaged:steps_total",
    "jpaged:host_seconds_total",
    "jpaged:device_idle_seconds_total",
    "jpaged:seconds_since_progress",
    *("jpaged:expert_balancedness_ratio", "jpaged:expert_rearrangements_total", "jpaged:experts_moved_total"),
    "jpaged:expert_peak_ratio",
    "jpaged:kv_events_dropped_total",
    "jpaged:kv_events_total",
    "jpaged:stalls_total",
    "jpaged:host_step_seconds",
}
NAMES |= {name.replace("disk", "external") for name in NAMES if "disk" in name}


class Scraped:
    """An engine that is stepped by hand, and the port that tells of it."""

    def __init__(self, executor: FakeExecutor, clock: Callable[[], float] | None = None, **options: Any) -> None:
        self.executor = executor
        geometry = executor.geometry
        config = EngineConfig().replace(**options)
        timing: dict[str, Any] = {} if clock is None else {"clock": clock}
        self.engine = Engine(executor, ByteTokenizer(), config, **timing)
        input_processor = InputProcessor(ByteTokenizer(), geometry)
        serving = LoadedModel(self.engine, input_processor, ByteTokenizer(), MODEL, BACKEND, config)
        self.serving = serving
        self._server = serve_metrics(serving, host="127.0.0.1", port=0)
        self.port = self._server.server_port
        self.events: list[OutputEvent] = []

    def submit(self, name: str, token_ids: list[int], **sampling: Any) -> None:
        params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **sampling})
        self.engine.submit(Request(name, tuple(token_ids), params), self.events.append)

    def run(self) -> None:
        while self.engine.step():
            """Until nothing is left to do."""

    def samples(self) -> dict[str, float]:
        return scrape(self.port)

    def close(self) -> None:
        self._server.stop()


def scrape(port: int) -> dict[str, float]:
    """Sample -> value; labels but the model's are part of the name."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    values = {}
    for family in families:
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == MODEL.name
            rest = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
            values[sample.name + (f"{{{rest}}}" if rest else "")] = sample.value
    return values


@contextmanager
def scraped(executor: FakeExecutor | None = None, **options: Any) -> Iterator[Scraped]:
    made = Scraped(executor or FakeExecutor(), **options)
    try:
        yield made
    finally:
        made.close()


def test_these_metrics_and_no_others():
    with scraped() as engine:
        samples = {name.partition("{")[0] for name in engine.samples()}
    histograms = {one.metric.name for one in DISTRIBUTIONS.values()}
    assert histograms < NAMES
    parts = {f"{name}_{part}" for name in histograms for part in ("bucket", "count", "sum")}
    assert samples == NAMES - histograms | parts
    own = {
        "vllm:kv_cache_usage_perc",
        "vllm:request_success_total",
        "vllm:cache_config_info",
        "jpaged:pool_limit_blocks",
        "vllm:lora_requests_info",
    }
    gauges = {metric.name for kind in ("gauge", "replica") for _, metric in get_metrics(kind)}
    counters = {f"{metric.name}_total" for _, metric in get_metrics("counter")}
    assert gauges | counters | histograms | own == NAMES


def test_what_runs_and_waits_is_seen():
    with scraped(FakeExecutor(max_num_seqs=1), overlap=False) as engine:
        before = engine.samples()
        for name in ("a", "b", "c"):
            engine.submit(name, [1, 2, 3, 4, 5])
        engine.engine.step()
        during = engine.samples()
        engine.run()
        after = engine.samples()
    running_, waiting = "vllm:num_requests_running", "vllm:num_requests_waiting"
    assert [(one[running_], one[waiting]) for one in (before, during, after)] == [(0, 0), (1, 2), (0, 0)]
    assert during["jpaged:blocks_referenced"] == 2
    assert during["vllm:kv_cache_usage_perc"] == 2 / 64
    assert during["jpaged:blocks_free"] == 62
    for name in ("requests_running", "requests_waiting", "blocks_cached", "blocks_referenced"):
        whole = {"requests": f"vllm:num_{name}", "blocks": f"jpaged:{name}"}[name.partition("_")[0]]
        assert during[f"jpaged:replica_{name}{{replica=0}}"] == during[whole]
    assert 0 < during["jpaged:slot_use_ratio"] <= 1
    assert (before["jpaged:blocks_cached"], after["jpaged:blocks_cached"] > 0) == (0, True)
    assert after["jpaged:blocks_free"] + after["jpaged:blocks_cached"] == 64
    assert after["jpaged:steps_total"] == engine.executor.num_steps
    assert after["vllm:prompt_tokens_total"] == 15
    assert after["vllm:generation_tokens_total"] == 24


def test_a_prefix_that_is_found_is_counted():
    with scraped() as engine:
        for name in ("a", "b"):
            engine.submit(name, list(range(9)))
            engine.run()
        samples = engine.samples()
    assert samples["vllm:prefix_cache_queries_total"] == 18
    assert samples["vllm:prefix_cache_hits_total"] == 8


def test_a_shared_block_that_is_written_to_is_a_copy():
    with scraped() as engine:
        engine.submit("a", [1, 2, 3, 4, 5], n=3, temperature=1.0, seed=1)
        engine.run()
        assert engine.samples()["jpaged:copies_on_write_total"] == 2


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_who_must_leave_is_counted(mode):
    executor = FakeExecutor(num_blocks=8, max_num_seqs=2, num_host_blocks=8, max_model_len=32)
    num_swapped = []
    with scraped(executor, preemption_mode=mode, enable_prefix_caching=False) as engine:
        for name in ("a", "b"):
            engine.submit(name, [ord(name), 2, 3, 4], max_tokens=20)
        while engine.engine.step():
            num_swapped.append(engine.engine.load().num_swapped)
            if num_swapped[-1] == 1 and num_swapped.count(1) == 1:
                assert engine.samples()["jpaged:num_requests_swapped"] == 1
        samples = engine.samples()
    is_swap = mode == "swap"
    assert samples["vllm:num_preemptions_total"] > 0
    assert (max(num_swapped) == 1) is is_swap
    assert (samples["jpaged:blocks_swapped_out_total"] > 0) is is_swap
    assert samples["jpaged:blocks_swapped_in_total"] == samples["jpaged:blocks_swapped_out_total"]
    assert (samples["jpaged:recomputed_tokens_total"] > 0) is not is_swap


def test_a_program_compiled_while_serving_is_seen():
    executor = FakeExecutor()
    with scraped(executor) as engine:
        assert engine.samples()["jpaged:compiles_after_warm_up_total"] == 0
        executor.num_compiles_after_warm_up = 2
        assert engine.samples()["jpaged:compiles_after_warm_up_total"] == 2


def test_how_requests_end_is_counted_by_reason():
    with scraped() as engine:
        engine.submit("length", [1, 2, 3])
        engine.submit("stop", [0], stop_token_ids=[0])  # with zeros alone the fake samples zero
        engine.run()
        for name in ("aborted", "left"):
            engine.submit(name, [1, 2, 3], max_tokens=50)
        engine.engine.step()
        engine.engine.abort("aborted")
        engine.engine.drop("left")
        engine.run()
        late = Request("late", (1, 2), SamplingParams(), deadline_s=engine.engine.clock() - 1)
        engine.engine.submit(late, engine.events.append)
        engine.run()
        samples = engine.samples()
    for reason, count in (("stop", 1), ("length", 1), ("abort", 2), ("deadline", 1), ("error", 0)):
        assert samples[f"vllm:request_success_total{{finished_reason={reason}}}"] == count
    assert samples["vllm:e2e_request_latency_seconds_count"] == 2


def test_every_histogram_holds_what_the_clock_said():
    clock = VirtualClock()
    with scraped(clock=clock, overlap=False, executor=FakeExecutor(max_num_seqs=2)) as engine:
        clock.advance(2.0)
        engine.submit("a", [1, 2, 3], max_tokens=3)
        engine.submit("b", [4, 5], max_tokens=2)
        clock.advance(0.4)
        while engine.engine.step():
            clock.advance(0.03)
        samples = engine.samples()
    # In the queue 0.4 s; the tokens at 0.4, 0.43, 0.46 and at 0.4, 0.43.
    assert samples["vllm:request_queue_time_seconds_count"] == 2
    assert samples["vllm:request_queue_time_seconds_sum"] == pytest.approx(0.8)
    assert samples["vllm:time_to_first_token_seconds_sum"] == pytest.approx(0.8)
    assert samples["vllm:time_to_first_token_seconds_bucket{le=0.25}"] == 0
    assert samples["vllm:time_to_first_token_seconds_bucket{le=0.5}"] == 2
    assert samples["vllm:inter_token_latency_seconds_count"] == 3
    assert samples["vllm:inter_token_latency_seconds_sum"] == pytest.approx(0.09)
    assert samples["vllm:e2e_request_latency_seconds_count"] == 2
    assert samples["vllm:e2e_request_latency_seconds_sum"] == pytest.approx(0.43 + 0.46)
    assert samples["jpaged:host_step_seconds_count"] == 3
    assert samples["vllm:request_prefill_time_seconds_sum"] == pytest.approx(0.0)
    assert samples["vllm:request_prefill_time_seconds_count"] == 2
    assert samples["vllm:request_decode_time_seconds_sum"] == pytest.approx(0.06 + 0.03)
    assert samples["vllm:request_inference_time_seconds_sum"] == pytest.approx(0.06 + 0.03)
    assert samples["vllm:request_time_per_output_token_seconds_sum"] == pytest.approx(2 * 0.03)
    assert samples["vllm:request_prompt_tokens_sum"] == 3 + 2
    assert samples["vllm:request_generation_tokens_sum"] == 3 + 2
    assert samples["vllm:request_generation_tokens_bucket{le=2.0}"] == 1
    assert samples["vllm:request_params_max_tokens_sum"] == 3 + 2
    assert samples["vllm:request_params_n_sum"] == 2


def test_who_runs_with_which_adapter_is_told():
    executor = with_adapters(2)(max_num_seqs=1)
    first, second = (LoadedAdapter(name, f"/{name}", i, FakeAdapter(i)) for i, name in enumerate("ab", start=1))
    with scraped(executor, overlap=False) as engine:
        for adapter in (first, second):
            params = SamplingParams(max_tokens=2, temperature=0.0)
            engine.engine.submit(Request(adapter.name, (1, 2), params, adapter=adapter), engine.events.append)
        engine.engine.step()
        during = engine.samples()
        engine.run()
        after = engine.samples()
    told = "vllm:lora_requests_info{{max_lora=2,running_lora_adapters={},waiting_lora_adapters={}}}"
    assert told.format("a", "b") in during
    assert told.format("", "") in after


def test_a_gap_is_counted_for_every_sequence_of_a_request():
    clock = VirtualClock()
    with scraped(clock=clock, overlap=False) as engine:
        engine.submit("a", [1, 2, 3], max_tokens=3, n=4, temperature=1.0, seed=1)
        while engine.engine.step():
            clock.advance(0.03)
        samples = engine.samples()
    assert samples["vllm:inter_token_latency_seconds_count"] == 8
    assert samples["vllm:inter_token_latency_seconds_sum"] == pytest.approx(8 * 0.03)


def test_the_hosts_time_is_without_the_wait_for_the_device():
    clock = VirtualClock()

    class Slow(FakeExecutor):
        def forward(self, inputs):
            clock.advance(0.002)
            return super().forward(inputs)

        def collect(self, handle):
            clock.advance(5.0)
            return super().collect(handle)

    with scraped(clock=clock, executor=Slow()) as engine:
        engine.submit("a", [1, 2, 3], max_tokens=4)
        engine.run()
        samples = engine.samples()
        assert engine.executor.num_steps == 4
    assert samples["jpaged:host_seconds_total"] == pytest.approx(4 * 0.002)
    assert samples["jpaged:host_step_seconds_sum"] == pytest.approx(4 * 0.002)
    assert samples["jpaged:host_step_seconds_count"] >= 4


@pytest.mark.parametrize("overlap", [False, True])
def test_the_device_is_idle_from_its_results_to_the_next_forward(overlap):
    clock = VirtualClock()

    class Copying(FakeExecutor):
        def move_blocks(self, moves):
            clock.advance(0.25)
            super().move_blocks(moves)

    with scraped(clock=clock, overlap=overlap, executor=Copying()) as engine:
        engine.submit("a", [1, 2, 3], max_tokens=4, n=2, temperature=1.0, seed=1)  # the second sample copies a block
        engine.run()
        assert engine.samples()["jpaged:device_idle_seconds_total"] == pytest.approx(0.25)
        clock.advance(100.0)
        engine.submit("b", [1, 2, 3], max_tokens=1)
        engine.run()
        assert engine.samples()["jpaged:device_idle_seconds_total"] == pytest.approx(0.25)


@pytest.mark.parametrize(("overlap", "idle_s"), [(False, 3 * 0.5), (True, 0.0)])
def test_the_device_is_not_idle_while_a_step_is_in_it(overlap, idle_s):
    clock = VirtualClock()

    class Late(FakeExecutor):
        def is_done(self, handle):
            return False

    with scraped(clock=clock, overlap=overlap, executor=Late()) as engine:
        request = Request("a", (1, 2, 3), SamplingParams(max_tokens=4, temperature=0.0))
        engine.engine.submit(request, lambda event: clock.advance(0.5))
        engine.run()
        assert engine.samples()["jpaged:device_idle_seconds_total"] == pytest.approx(idle_s)


def test_no_step_is_progress_and_for_long_a_stall_while_there_are_requests():
    clock = VirtualClock()
    with scraped(clock=clock) as engine:
        clock.advance(1000.0)
        assert told_progress(engine) == (0.0, 0.0)  # nobody waits
        engine.submit("a", [1, 2, 3], max_tokens=3)
        clock.advance(29.0)
        assert told_progress(engine) == (29.0, 0.0)
        clock.advance(2.0)
        assert told_progress(engine) == (31.0, 1.0)
        engine.engine.step()
        assert told_progress(engine) == (0.0, 1.0)
        clock.advance(40.0)
        assert told_progress(engine) == (40.0, 2.0)
        engine.run()
        clock.advance(1000.0)
        assert told_progress(engine) == (0.0, 2.0)


def told_progress(engine):
    """Seconds without a step, and stalls."""
    samples = engine.samples()
    return samples["jpaged:seconds_since_progress"], samples["jpaged:stalls_total"]


def test_a_histograms_bounds_belong_to_their_bucket():
    histogram = Histogram((0.1, 1.0))
    for seconds, count in ((0.1, 2), (0.5, 3), (2.0, 1)):
        histogram.observe(seconds, count)
    snapshot = histogram.snapshot()
    assert snapshot.cumulative_counts == (2, 5, 6)
    assert snapshot.sum == pytest.approx(3.7)


def test_a_port_that_is_taken_is_named():
    with scraped() as engine, pytest.raises(InvalidArgument, match=f"cannot listen on port {engine.port} of 127"):
        serve_metrics(engine.serving, host="127.0.0.1", port=engine.port)


async def test_the_server_answers_scrapes_while_it_serves():
    async with running(metrics_port=0) as harness:
        port = harness.server.metrics_port
        assert port is not None
        assert scrape(port)["vllm:num_requests_running"] == 0
        labels = "block_size=4,enable_prefix_caching=True,kv_policy=paged,num_cpu_blocks=0,num_gpu_blocks=64"
        assert scrape(port)[f"vllm:cache_config_info{{{labels}}}"] == 1
    with pytest.raises(OSError, match="refused"):
        scrape(port)
    async with running() as harness:
        assert harness.server.metrics_port is None
