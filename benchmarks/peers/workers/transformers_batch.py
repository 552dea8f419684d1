"""Hugging Face's generate over batches of like lengths, padded on the left: how one serves many prompts with it."""

from __future__ import annotations

import time

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks.peers.workers.protocol import Answer, Settings, serve
from benchmarks.peers.workloads import Job


class Transformers:
    """A causal language model of transformers; its one option is `batch_size`, sequences at a time."""

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(1)
        self._batch_size = settings.options["batch_size"]
        dtype = getattr(torch, settings.dtype)
        model = AutoModelForCausalLM.from_pretrained(settings.folder, dtype=dtype, attn_implementation="sdpa")
        self._model = model.eval()

    def about(self) -> dict[str, object]:
        return {"transformers": transformers.__version__, "torch": torch.__version__}

    def forget(self) -> None:
        """Nothing is cached between calls."""

    def run(self, jobs: list[Job]) -> Answer:
        begin = time.perf_counter()
        outputs = self._answer(jobs)
        wall_s = time.perf_counter() - begin
        return Answer(outputs, wall_s)

    def processor_s(self) -> float:
        return time.process_time()

    def close(self) -> None:
        del self._model

    def _answer(self, jobs: list[Job]) -> list[list[list[int]]]:
        num_jobs = max(1, self._batch_size // jobs[0].num_sequences)
        order = sorted(range(len(jobs)), key=lambda i: 2 * jobs[i].max_tokens + len(jobs[i].prompt))
        outputs: list[list[list[int]]] = [[] for _ in jobs]
        for begin in range(0, len(jobs), num_jobs):
            batch = order[begin : begin + num_jobs]
            for index, sequences in zip(batch, self._generate([jobs[i] for i in batch]), strict=True):
                outputs[index] = sequences
        return outputs

    @torch.inference_mode()
    def _generate(self, jobs: list[Job]) -> list[list[list[int]]]:
        """Runs one batch until its longest output is there; the others are cut."""
        first = jobs[0]
        num_prompt = max(len(job.prompt) for job in jobs)
        num_new = max(job.max_tokens for job in jobs)
        pads = [num_prompt - len(job.prompt) for job in jobs]
        config = GenerationConfig(
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            eos_token_id=None,
            pad_token_id=0,
            do_sample=first.temperature > 0,
            top_k=0,
            num_beams=first.beam_width or 1,
            num_return_sequences=first.num_sequences,
        )
        ids = self._model.generate(
            input_ids=torch.tensor([[0] * pad + list(job.prompt) for pad, job in zip(pads, jobs, strict=True)]),
            attention_mask=torch.tensor([[0] * pad + [1] * (num_prompt - pad) for pad in pads]),
            generation_config=config,
        )
        rows = ids[:, num_prompt:].tolist()
        count = first.num_sequences
        return [[row[: job.max_tokens] for row in rows[i * count : (i + 1) * count]] for i, job in enumerate(jobs)]


if __name__ == "__main__":
    serve(Transformers)
