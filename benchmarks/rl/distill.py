"""Distillation on the student's own samples: `python -m benchmarks.rl.distill --steps 60`.

The packaged draft model learns from the demo model. Each step:

    student samples | teacher scores them (`LLM.score_continuations`) | gradient | LLM.update_weights

A token's advantage is the teacher's log-probability minus the student's, so the gradient lowers the divergence of the
student from the teacher where the student goes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.rl.grpo import SUBJECTS, Settings, Trainer, make_batch
from jpaged import LLM, SamplingParams
from jpaged.demo import DRAFT_FOLDER
from jpaged.llm import TokensPrompt

SETTINGS = Settings(learning_rate=3e-4)


def distill(teacher: LLM, student: LLM, num_steps: int, seed: int) -> Iterator[float]:
    """Train the student; yield the estimated divergence of each step's samples, in nats per token."""
    trainer, rng = Trainer(DRAFT_FOLDER, SETTINGS), np.random.default_rng(seed)
    student.update_weights(trainer.weights, version=0)
    for step in range(1, num_steps + 1):
        subjects = rng.choice(SUBJECTS, SETTINGS.num_prompts, replace=False)
        params = [
            SamplingParams(n=SETTINGS.group_size, max_tokens=SETTINGS.max_tokens, logprobs=0, seed=int(one))
            for one in rng.integers(2**31, size=len(subjects))
        ]
        prompts = [f"<|user|>Tell me a story about a {subject}.<|assistant|>" for subject in subjects]
        groups = student.generate(prompts, params, use_tqdm=False)
        scores = teacher.score_continuations(
            [TokensPrompt(prompt_token_ids=group.prompt_token_ids) for group in groups],
            [[output.token_ids for output in group.outputs] for group in groups],
            use_tqdm=False,
        )
        batch = make_batch(groups, np.zeros((len(groups), SETTINGS.group_size)), SETTINGS.row_len)
        is_sampled, advantages = np.asarray(batch.is_sampled_bt), np.array(batch.advantages_bt)
        of_teacher = [token.logprob for of_prompt in scores for score in of_prompt for token in score.tokens]
        advantages[is_sampled] = of_teacher - np.asarray(batch.old_logprobs_bt)[is_sampled]
        trainer.step(batch._replace(advantages_bt=jnp.asarray(advantages)))
        student.update_weights(trainer.weights, version=step)
        yield float(-advantages[is_sampled].mean())


def main() -> None:
    """Train, and print the divergence."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rl.distill", description="Distillation of the demo.")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="seed of prompts and samples (default: 0)")
    args = parser.parse_args()
    sizes: dict[str, Any] = {"dtype": "float32", "linear_backend": "xla", "max_num_seqs": 32, "max_model_len": 64}
    with LLM("demo", **sizes) as teacher, LLM("demo-draft", **sizes) as student:
        for step, divergence in enumerate(distill(teacher, student, args.steps, args.seed), start=1):
            print(f"step {step}  divergence {divergence:.4f} nats per token", flush=True)


if __name__ == "__main__":
    main()
