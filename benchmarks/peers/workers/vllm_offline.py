"""vLLM's LLM in this process: its engine's own process would share the core with this one."""

from __future__ import annotations

import time

import torch
import vllm
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform
from vllm.sampling_params import BeamSearchParams

from benchmarks.peers.workers.protocol import Answer, Settings, serve
from benchmarks.peers.workloads import Job


class Vllm:
    """An LLM of vLLM."""

    def __init__(self, settings: Settings) -> None:
        self._llm = LLM(
            model=settings.folder,
            dtype=settings.dtype,
            enable_prefix_caching=True,
            disable_log_stats=False,  # else outputs have no times
            **settings.options,
        )

    def about(self) -> dict[str, object]:
        platform = type(current_platform).__name__
        return {"vllm": vllm.__version__, "torch": torch.__version__, "platform": platform}

    def forget(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache")

    def run(self, jobs: list[Job]) -> Answer:
        prompts = [{"prompt_token_ids": list(job.prompt)} for job in jobs]
        if width := jobs[0].beam_width:
            params = BeamSearchParams(beam_width=width, max_tokens=jobs[0].max_tokens, ignore_eos=True)
            begin = time.perf_counter()
            found = self._llm.beam_search(prompts, params)
            wall_s = time.perf_counter() - begin
            beams = [
                [list(sequence.tokens)[len(job.prompt) :] for sequence in output.sequences]
                for job, output in zip(jobs, found, strict=True)
            ]
            return Answer(beams, wall_s)
        sampling = [
            SamplingParams(
                n=job.n, temperature=job.temperature, max_tokens=job.max_tokens, ignore_eos=True, detokenize=False
            )
            for job in jobs
        ]
        begin = time.perf_counter()
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        wall_s = time.perf_counter() - begin
        times = [output.metrics for output in outputs if output.metrics]
        lengths = [len(output.outputs[0].token_ids) for output in outputs if output.metrics]
        return Answer(
            [[list(sequence.token_ids) for sequence in output.outputs] for output in outputs],
            wall_s,
            [one.first_token_latency for one in times],
            [
                (one.last_token_ts - one.first_token_ts) / (length - 1)
                for one, length in zip(times, lengths, strict=True)
                if length > 1
            ],
        )

    def processor_s(self) -> float:
        return time.process_time()

    def close(self) -> None:
        del self._llm


if __name__ == "__main__":
    serve(Vllm)
