"""The reward of GRPO over its steps: `python -m benchmarks.rl`; writes results/grpo.json and docs/pictures/grpo.png."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path

import matplotlib as mpl
import numpy as np
import optax
from matplotlib.figure import Figure

from benchmarks.record import save
from benchmarks.rl.grpo import Settings, Step, open_sampler, train

mpl.use("Agg")

PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "grpo.png"
_WIDTH = 10


def draw(rewards: list[list[float]], path: Path) -> None:
    """Draw each run as a mean of ten steps, and the mean of the runs."""
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    ax = figure.subplots()
    smooth = [np.convolve(run, np.ones(_WIDTH) / _WIDTH, "valid") for run in rewards]
    steps = np.arange(_WIDTH, len(rewards[0]) + 1)
    for run in smooth:
        ax.plot(steps, run, color="#56b4e9", linewidth=1, alpha=0.8)
    ax.plot(steps, np.mean(smooth, axis=0), color="#0072b2", linewidth=2, label=f"mean of {len(rewards)} seeds")
    ax.set_title("GRPO on the demo model: mean reward of the last ten steps", fontsize=11)
    ax.set_xlabel("optimizer step", fontsize=8)
    ax.set_ylabel("reward", fontsize=8)
    ax.set_ylim(0, 1)
    ax.tick_params(labelsize=8)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25)
    ax.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=160)


def main() -> None:
    """Train with each seed; write the record and the picture."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rl", description="Reward curve of GRPO.")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of a run (default: 200)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds (default: 0 1 2)")
    args = parser.parse_args()
    settings, runs = Settings(), []
    with open_sampler() as llm:
        for seed in args.seeds:
            start_s, cpu_s = time.perf_counter(), time.process_time()
            steps: list[Step] = []
            for step in train(llm, settings, args.steps, seed):
                steps.append(step)
                if step.number % 10 == 0:
                    mean = np.mean([one.measured["reward"] for one in steps[-10:]])
                    print(f"seed {seed}, step {step.number}: reward {mean:.3f}", flush=True)
            times = np.median([one.times_s for one in steps], axis=0)
            runs.append(
                {
                    "seed": seed,
                    "wall_s": round(time.perf_counter() - start_s, 1),
                    "cpu_s": round(time.process_time() - cpu_s, 1),
                    "median_sample_s": round(times[0], 3),
                    "median_train_s": round(times[1], 3),
                    "median_update_s": round(times[2], 3),
                    "max_ratio_error": max(one.measured["max_ratio_error"] for one in steps),
                    "first_text": steps[0].text,
                    "last_text": steps[-1].text,
                    "rewards": [round(one.measured["reward"], 6) for one in steps],
                }
            )
            command = f"python -m benchmarks.rl --steps {args.steps} --seeds {' '.join(map(str, args.seeds))}"
            save("grpo", command, {"optax": optax.__version__, "settings": asdict(settings), "runs": runs})
    draw([run["rewards"] for run in runs], PICTURE)


if __name__ == "__main__":
    main()
