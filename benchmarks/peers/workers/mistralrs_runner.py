"""mistral.rs in this process, by its Python class Runner, which accepts text and one request at a time.

Prompts are common words, as many as make the requested number of tokens by the Runner's own count.
"""

from __future__ import annotations

import importlib.metadata
import time
from pathlib import Path

from mistralrs import CompletionRequest, Runner, Which

from benchmarks.peers.workers.protocol import Answer, Settings, serve
from benchmarks.peers.workloads import Job

WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")
"""Words that are single tokens with a space before them in the vocabularies of both pretrained models."""
PROBES = (8, 16)
"""Numbers of words that measure tokens per word."""


class MistralRs:
    """A Runner over a GGUF file."""

    def __init__(self, settings: Settings) -> None:
        path = Path(settings.folder)
        which = Which.GGUF(quantized_model_id=str(path.parent), quantized_filename=path.name)
        self._runner = Runner(which=which, **settings.options)
        self._words_per_token: tuple[float, float] | None = None

    def about(self) -> dict[str, object]:
        return {"mistralrs": importlib.metadata.version("mistralrs")}

    def forget(self) -> None:
        """Do nothing: the prefix cache is off."""

    def run(self, jobs: list[Job]) -> Answer:
        if len(jobs) > 1:
            raise ValueError(
                "Runner.send_completion_request refuses concurrent requests: RuntimeError: Already borrowed"
            )
        job = jobs[0]
        prompt = _text(job, self._count_words(len(job.prompt)))
        begin = time.perf_counter()
        usage = self._generate(prompt, job.max_tokens)
        wall_s = time.perf_counter() - begin
        if usage.prompt_tokens != len(job.prompt):
            raise ValueError(f"the prompt has {usage.prompt_tokens} tokens instead of {len(job.prompt)}")
        return Answer([[[0] * usage.completion_tokens]], wall_s)  # it returns text and counts, no ids

    def processor_s(self) -> float:
        return time.process_time()

    def close(self) -> None:
        del self._runner

    def _generate(self, prompt: str, max_tokens: int):
        request = CompletionRequest(
            model="default", prompt=prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True
        )
        return self._runner.send_completion_request(request).usage

    def _count_words(self, num_tokens: int) -> int:
        """Return the number of words that make a number of tokens: each word has as many, plus a constant."""
        if self._words_per_token is None:
            few, more = (self._generate(_text(Job([count], 1), count), 1).prompt_tokens for count in PROBES)
            slope = (more - few) / (PROBES[1] - PROBES[0])
            self._words_per_token = slope, few - slope * PROBES[0]
        slope, constant = self._words_per_token
        return round((num_tokens - constant) / slope)


def _text(job: Job, num_words: int) -> str:
    """Return words chosen by the job's ids, so that other jobs have other prompts."""
    ids = job.prompt
    return " ".join(WORDS[(ids[index % len(ids)] + index) % len(WORDS)] for index in range(num_words))


if __name__ == "__main__":
    serve(MistralRs)
