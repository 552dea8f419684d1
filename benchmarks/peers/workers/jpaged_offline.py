"""jpaged's LLM in this process, by its public face alone."""

from __future__ import annotations

import time

import jax

import jpaged
from benchmarks.peers.workers.protocol import Answer, Settings, serve
from benchmarks.peers.workloads import Job
from jpaged import LLM, SamplingParams


class Jpaged:
    """An LLM of jpaged; no text is made, as of the others."""

    def __init__(self, settings: Settings) -> None:
        self._llm = LLM(settings.folder, dtype=settings.dtype, **settings.options)
        self._num_runs = 0

    def about(self) -> dict[str, object]:
        return {"jpaged": jpaged.__version__, "jax": jax.__version__}

    def forget(self) -> None:
        self._num_runs += 1

    def run(self, jobs: list[Job]) -> Answer:
        prompts = [{"prompt_token_ids": list(job.prompt)} for job in jobs]
        sampling = [
            SamplingParams(
                n=job.num_sequences,
                beam_width=job.beam_width or None,
                temperature=job.temperature,
                max_tokens=job.max_tokens,
                ignore_eos=True,
                cache_salt=f"run {self._num_runs}",
            )
            for job in jobs
        ]
        begin = time.perf_counter()
        outputs = self._llm.generate(prompts, sampling)
        wall_s = time.perf_counter() - begin
        return Answer([[list(sequence.token_ids) for sequence in output.outputs] for output in outputs], wall_s)

    def processor_s(self) -> float:
        return time.process_time()

    def close(self) -> None:
        self._llm.close()


if __name__ == "__main__":
    serve(Jpaged)
