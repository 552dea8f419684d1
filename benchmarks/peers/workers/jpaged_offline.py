"""jpaged's LLM in this process, by its public face alone."""

from __future__ import annotations

import time

import jax

import jpaged
from benchmarks.peers.workers.protocol import Answer, Settings, serve
from benchmarks.peers.workloads import Job
from jpaged import LLM, SamplingParams
from jpaged.llm import TokensPrompt

COUNTS = (
    "num_steps",
    "host_s",
    "device_idle_s",
    "num_prefix_hit_tokens",
    "num_cascade_steps",
    "num_preemptions",
    "num_copies_on_write",
    "num_compiles_after_warm_up",
)
"""What is told of a run: differences of `LLM.load()`."""


class Jpaged:
    """An LLM of jpaged."""

    def __init__(self, settings: Settings) -> None:
        self._llm = LLM(settings.folder, dtype=settings.dtype, **{"wait_for_all_programs": True, **settings.options})
        self._is_default_dtype = settings.dtype == "auto"

    def about(self) -> dict[str, object]:
        versions: dict[str, object] = {"jpaged": jpaged.__version__, "jax": jax.__version__}
        if not self._is_default_dtype:
            return versions
        config = self._llm.config
        dtype, products = config.model.dtype, config.model.activation_dtype
        reported = {"activations": dtype, "products": dtype if products == "model" else products}
        return {**versions, **reported, "kv_cache": config.cache.kv_cache_dtype}

    def forget(self) -> None:
        self._llm.reset_prefix_cache()

    def run(self, jobs: list[Job]) -> Answer:
        prompts = [TokensPrompt(prompt_token_ids=job.prompt) for job in jobs]
        sampling = [
            SamplingParams(
                n=job.num_sequences,
                beam_width=job.beam_width or None,
                temperature=job.temperature,
                max_tokens=job.max_tokens,
                ignore_eos=True,
                detokenize=False,
            )
            for job in jobs
        ]
        before = self._llm.load()
        begin = time.perf_counter()
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        wall_s = time.perf_counter() - begin
        after = self._llm.load()
        counts = {name: getattr(after, name) - getattr(before, name) for name in COUNTS}
        if num_compiles := counts.pop("num_compiles_after_warm_up"):
            raise RuntimeError(f"{num_compiles} programs were compiled in what is timed")
        ttft_s, tpot_s = [], []
        for job, output in zip(jobs, outputs, strict=True):
            times = output.times
            if times and times.first_token_s is not None and times.last_token_s is not None and not job.beam_width:
                ttft_s.append(times.first_token_s - times.arrival_s)
                tpot_s.append((times.last_token_s - times.first_token_s) / max(1, job.max_tokens - 1))
        tokens = [[list(sequence.token_ids) for sequence in output.outputs] for output in outputs]
        return Answer(tokens, wall_s, ttft_s, tpot_s, counts)

    def processor_s(self) -> float:
        return time.process_time()

    def close(self) -> None:
        self._llm.close()


if __name__ == "__main__":
    serve(Jpaged)
