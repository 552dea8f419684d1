"""OpenVINO GenAI's continuous batching in this process; it reads the GGUF file itself.

The options are fields of its SchedulerConfig, and `num_threads`.
"""

from __future__ import annotations

import time

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.workers.protocol import Answer, Settings, serve
from benchmarks.peers.workloads import Job

REPORTED = {
    "activations": "INFERENCE_PRECISION_HINT",
    "dynamic_quantization_group": "DYNAMIC_QUANTIZATION_GROUP_SIZE",
    "kv_cache": "KV_CACHE_PRECISION",
}
"""Properties of the CPU plugin that a record has, with their default values here."""


class OpenVino:
    """A continuous-batching pipeline with default precisions."""

    def __init__(self, settings: Settings) -> None:
        options = dict(settings.options)
        # taskset pins the process; the plugin's own pinning would choose cores outside that set.
        properties = {"INFERENCE_NUM_THREADS": options.pop("num_threads"), "ENABLE_CPU_PINNING": False}
        scheduler = openvino_genai.SchedulerConfig()
        for name, value in options.items():
            setattr(scheduler, name, value)
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(settings.folder, scheduler, "CPU", properties)

    def about(self) -> dict[str, object]:
        core = openvino.Core()
        reported = {name: _plain(core.get_property("CPU", key)) for name, key in REPORTED.items()}
        return {"openvino": openvino.__version__, "openvino-genai": openvino_genai.__version__, **reported}

    def forget(self) -> None:
        """Do nothing: the prefix cache is off."""

    def run(self, jobs: list[Job]) -> Answer:
        prompts = [openvino.Tensor(np.array([job.prompt], dtype=np.int64)) for job in jobs]
        configs = [_config(job) for job in jobs]
        begin = time.perf_counter()
        results = self._pipeline.generate(prompts, configs)
        wall_s = time.perf_counter() - begin
        # Requests of one call are numbered in order.
        ordered = sorted(results, key=lambda result: result.m_request_id)
        return Answer([[list(ids) for ids in result.m_generation_ids] for result in ordered], wall_s)

    def processor_s(self) -> float:
        return time.process_time()

    def close(self) -> None:
        del self._pipeline


def _config(job: Job) -> openvino_genai.GenerationConfig:
    """Return the configuration of exactly `max_tokens` greedy tokens.

    Raises:
        ValueError: the job samples or searches with beams.
    """
    if job.temperature or job.num_sequences != 1:
        raise ValueError("this worker generates one greedy sequence per request")
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = job.max_tokens
    config.do_sample = False
    config.ignore_eos = True
    return config


def _plain(value: object) -> object:
    """Return a property's value for JSON: `<Type: 'bfloat16'>` as `bfloat16`."""
    return value if isinstance(value, int | str) else str(value).removeprefix("<Type: '").removesuffix("'>")


if __name__ == "__main__":
    serve(OpenVino)
