"""Trains the demo model from a seed: `python -m benchmarks.demo_model.train`.

The grammar gives documents, the tokenizer is learnt from them, rows are packed, and the project's own Llama is trained
with AdamW. A run that was interrupted goes on from its last saved state; the same seed gives the same batches.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from tokenizers import Tokenizer

from benchmarks.demo_model.attention import attend
from benchmarks.demo_model.data import Batch, Lesson, batch
from benchmarks.demo_model.muon import scale_by_muon
from benchmarks.demo_model.saving import save_params
from benchmarks.demo_model.stories.grammar import END
from benchmarks.demo_model.tokenizer import MAX_LEN, save_tokenizer, train_tokenizer
from jpaged.checkpoints.conversion import ConversionOptions, convert_folder
from jpaged.checkpoints.tensor_files import SINGLE_FILE
from jpaged.demo import FOLDER
from jpaged.models.config import ModelConfig
from jpaged.models.decoder import DecoderConfig
from jpaged.models.layers import Params
from jpaged.models.model import Model
from jpaged.models.rope_config import RopeConfig
from jpaged.models.tokens import TokenBatch

Step = Callable[[Params, optax.OptState, Batch], tuple[Params, optax.OptState, jax.Array]]


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the run.

    Attributes:
        until: first step that is not in it.
        rate: the learning rate.
        lesson: how documents are shown.
        is_falling: the rate falls by a cosine, to a fiftieth.
    """

    until: int
    rate: float
    lesson: Lesson
    is_falling: bool = False


# Beginnings of documents first, with introductions between them: there a name, a noun or a pronoun comes again within a
# few words, and the model finds out that it can copy. Then whole documents, what must be kept weighing less and less.
PHASES = (
    Phase(300, 3e-3, Lesson(64, emphasis=3.0, introductions=True)),
    Phase(600, 3e-3, Lesson(128, emphasis=3.0, introductions=True)),
    Phase(1800, 3e-3, Lesson(emphasis=3.0, introductions=True)),
    Phase(3200, 3e-3, Lesson(emphasis=2.0)),
    Phase(5000, 3e-3, Lesson(emphasis=1.5), is_falling=True),
)


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """What a run depends on.

    Attributes:
        seed: of the corpus, the tokenizer and the first parameters.
        num_rows: rows of a batch.
        row_len: tokens of a row; a longer document is left out.
        num_warmup_steps: steps of linear warm-up.
        weight_decay: of matrices; norms are not decayed.
        phases: the run, in order.
        dtype: of the forward and backward pass; parameters and the optimizer stay in float32.
    """

    seed: int = 2024
    num_rows: int = 6
    row_len: int = 384
    num_warmup_steps: int = 100
    weight_decay: float = 0.05
    phases: tuple[Phase, ...] = PHASES
    dtype: str = "bfloat16"

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.phases[-1].until

    def lesson(self, step: int) -> Lesson:
        """How documents are shown in this step."""
        return next(phase.lesson for phase in self.phases if step < phase.until)


def demo_config(tokenizer: Tokenizer) -> DecoderConfig:
    """The shape of the demo model."""
    eos_token_id = tokenizer.encode(END).ids[0]
    return DecoderConfig(
        architecture="LlamaForCausalLM",
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=640,
        num_layers=4,
        num_heads=8,
        num_kv_heads=4,
        head_dim=32,
        norm_eps=1e-5,
        ropes=(RopeConfig(),),
        max_position_embeddings=MAX_LEN,
        tie_word_embeddings=True,
        eos_token_ids=(eos_token_id,),
        checkpoint_dtype="bfloat16",
    )


def logits_of(model: Model, params: Params, rows: Batch) -> jax.Array:
    """Logits of packed rows, `[T, V]`."""
    segments = jnp.asarray(rows.segments)
    row_len = segments.shape[1]
    mask_bst = (segments[:, :, None] == segments[:, None, :]) & jnp.triu(jnp.ones((row_len, row_len), bool))
    positions_t = jnp.asarray(rows.positions).reshape(-1)
    tokens = TokenBatch(jnp.asarray(rows.token_ids).reshape(-1), positions_t, jnp.full_like(positions_t, row_len))
    hidden, _ = model.run(params, tokens, functools.partial(attend, mask_bst), (), "loop")
    return model.logits(params, hidden)


def loss_sum(model: Model, params: Params, rows: Batch) -> tuple[jax.Array, jax.Array]:
    """Summed cross entropy of the learnt tokens, and their number."""
    losses = cross_entropy(logits_of(model, params, rows), jnp.asarray(rows.targets).reshape(-1))
    weights = rows.weights.reshape(-1)
    return (losses * weights).sum(), weights.sum()


@jax.custom_vjp
def cross_entropy(logits_tv: jax.Array, targets_t: jax.Array) -> jax.Array:
    """The negative logarithm of each target's probability, `[T]`."""
    return _cross_entropy(logits_tv, targets_t)[0]


def _cross_entropy(logits_tv: jax.Array, targets_t: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    total_t = jax.nn.logsumexp(logits_tv, axis=-1)
    target_logits_t = jnp.take_along_axis(logits_tv, targets_t[:, None], axis=-1)[:, 0]
    return total_t - target_logits_t, (logits_tv, total_t, targets_t)


def _cross_entropy_gradient(saved: tuple[jax.Array, ...], d_losses_t: jax.Array) -> tuple[jax.Array, None]:
    logits_tv, total_t, targets_t = saved
    # A comparison with iota, where the gradient of a gather is a scatter into [T, V].
    is_target = jnp.arange(logits_tv.shape[-1])[None] == targets_t[:, None]
    return (jnp.exp(logits_tv - total_t[:, None]) - is_target) * d_losses_t[:, None], None


cross_entropy.defvjp(_cross_entropy, _cross_entropy_gradient)


def make_optimizer(settings: TrainSettings) -> optax.GradientTransformation:
    """Muon for the layers' kernels, AdamW for embedding and norms, with the rates of the phases and clipping."""
    starts = (settings.num_warmup_steps, *(phase.until for phase in settings.phases[:-1]))
    parts = [optax.linear_schedule(0.0, settings.phases[0].rate, settings.num_warmup_steps)]
    for start, phase in zip(starts, settings.phases, strict=True):
        falling = optax.cosine_decay_schedule(phase.rate, phase.until - start, alpha=0.02)
        parts.append(falling if phase.is_falling else optax.constant_schedule(phase.rate))
    rate = optax.join_schedules(parts, starts)

    def finish(scale: optax.GradientTransformation) -> optax.GradientTransformation:
        decay = optax.add_decayed_weights(settings.weight_decay, mask=lambda p: jax.tree.map(lambda a: a.ndim > 1, p))
        return optax.chain(scale, decay, optax.scale_by_learning_rate(rate))

    kinds = {"kernel": finish(scale_by_muon()), "other": finish(optax.scale_by_adam(b1=0.9, b2=0.98))}
    return optax.chain(optax.clip_by_global_norm(1.0), optax.partition(kinds, _kinds))


def _kinds(params: optax.Params) -> optax.Params:
    def kind(path: jax.tree_util.KeyPath, leaf: jax.Array) -> str:
        return "kernel" if path[0] == jax.tree_util.DictKey("layers") and leaf.ndim > 1 else "other"

    return jax.tree_util.tree_map_with_path(kind, params)


@functools.lru_cache(maxsize=4)
def make_step(config: DecoderConfig, settings: TrainSettings) -> Step:
    """One jitted optimizer step; parameters and optimizer state are donated."""
    dtype = jnp.dtype(settings.dtype)
    model, optimizer = Model(config, dtype), make_optimizer(settings)

    def mean_loss(params: Params, rows: Batch) -> jax.Array:
        total, count = loss_sum(model, jax.tree.map(lambda a: a.astype(dtype), params), rows)
        return total / jnp.maximum(count, 1.0)  # a batch may hold prompts only

    def step(params: Params, state: optax.OptState, rows: Batch) -> tuple[Params, optax.OptState, jax.Array]:
        loss, gradients = jax.value_and_grad(mean_loss)(params, rows)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    return jax.jit(step, donate_argnums=(0, 1))


def held_out_loss(config: DecoderConfig, settings: TrainSettings, tokenizer: Tokenizer, params: Params) -> float:
    """Mean cross entropy over eight batches of documents that no training step sees."""
    evaluate = jax.jit(functools.partial(loss_sum, Model(config, jnp.dtype(jnp.float32))))
    total = count = 0.0
    for step in range(8):
        rows = batch(tokenizer, settings.seed + 1, step, (settings.num_rows, settings.row_len), Lesson())
        part, number = evaluate(params, rows)
        total, count = total + float(part), count + float(number)
    return total / count


def train(
    config: DecoderConfig,
    settings: TrainSettings,
    tokenizer: Tokenizer,
    num_steps: int,
    work: Path | None = None,
    every: int = 20,
) -> Params:
    """Train, and return float32 parameters in loop mode.

    Args:
        config: shape of the model.
        settings: what the run depends on.
        tokenizer: turns documents into tokens.
        num_steps: how many of the run's steps to take.
        work: folder for the state of an interrupted run, taken up again where it is found; None keeps no state.
        every: steps between two lines of progress; the state is saved five times less often.
    """
    step_fn = make_step(config, settings)
    params = Model(config, jnp.dtype(jnp.float32)).init_params(jax.random.key(settings.seed), "loop")
    state = make_optimizer(settings).init(params)
    first = 0
    with ocp.StandardCheckpointer() as saver:
        if work is not None and (saved := _latest(work)) is not None:
            params, state = saver.restore(saved, {"params": params, "state": state}).values()
            first = int(saved.name)
            print(f"going on from step {first} in {work}", flush=True)
        start, losses, num_tokens = time.perf_counter(), [], 0
        for step in range(first, num_steps):
            rows = batch(tokenizer, settings.seed, step, (settings.num_rows, settings.row_len), settings.lesson(step))
            params, state, loss = step_fn(params, state, rows)
            losses.append(loss)  # still under way: the next batch is made meanwhile
            num_tokens += int((rows.segments > 0).sum())
            if (step + 1) % every == 0 or step + 1 == num_steps:
                loss.block_until_ready()
                spent_s = time.perf_counter() - start
                left_s = spent_s / (step + 1 - first) * (num_steps - step - 1)
                print(
                    f"step {step + 1}/{num_steps}  loss {np.mean(jax.device_get(losses)):.4f}  "
                    f"{num_tokens / spent_s:.0f} tokens/s  {num_tokens / 1e6:.2f}M tokens  {left_s / 60:.1f} min left",
                    flush=True,
                )
                losses = []
            if work is not None and (step + 1) % (5 * every) == 0:
                _save_state(saver, work, step + 1, params, state)
    return params


def package(folder: Path, config: ModelConfig, params: Params, tokenizer: Tokenizer) -> None:
    """Write a checkpoint folder in Hugging Face layout, weights in bfloat16, in place of one that was there."""
    with tempfile.TemporaryDirectory() as scratch:
        save_params(params, config, Path(scratch) / "float32")
        convert_folder(Path(scratch) / "float32", folder, ConversionOptions("safetensors", "bfloat16", force=True))
    save_tokenizer(tokenizer, folder)


def _save_state(saver: ocp.StandardCheckpointer, work: Path, step: int, params: Params, state: optax.OptState) -> None:
    previous = _latest(work)
    saver.save(work / str(step), {"params": params, "state": state})
    saver.wait_until_finished()
    if previous is not None:
        shutil.rmtree(previous)


def _latest(work: Path) -> Path | None:
    saved = [path for path in work.glob("*") if path.name.isdigit()]
    return max(saved, key=lambda path: int(path.name), default=None)


def read_options(parser: argparse.ArgumentParser, seed: int, num_steps: int, out: Path) -> argparse.Namespace:
    """Add the options of a training to a parser, and return those of the command line.

    Args:
        seed, num_steps, out: defaults; `num_steps` is the limit, too.
    """
    parser.add_argument("--seed", type=int, default=seed, help="of the data, the tokenizer and the first parameters")
    parser.add_argument(
        "--steps", type=int, default=num_steps, help="optimizer steps, at most and by default all of them"
    )
    parser.add_argument("--out", type=Path, default=out, help="folder of the packaged checkpoint")
    parser.add_argument("--every", type=int, default=20, help="steps between two lines of progress")
    args = parser.parse_args()
    if not 0 < args.steps <= num_steps:
        parser.error(f"--steps is {args.steps}; it must be from 1 to {num_steps}")
    if args.out.is_dir() and any(args.out.iterdir()) and not (args.out / SINGLE_FILE).is_file():
        parser.error(f"--out is {args.out}, which holds something else than a checkpoint")
    return args


def main() -> None:
    """Train and package the demo model."""
    settings = TrainSettings()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo_model.train", description="Train and package the demo model."
    )
    parser.add_argument("--work", type=Path, help="folder that keeps the state of an interrupted run")
    args = read_options(parser, settings.seed, settings.num_steps, FOLDER)
    settings = TrainSettings(seed=args.seed)
    tokenizer = train_tokenizer(settings.seed)
    config = demo_config(tokenizer)
    work = args.work.resolve() if args.work else None
    params = train(config, settings, tokenizer, args.steps, work, args.every)
    print(f"held-out loss {held_out_loss(config, settings, tokenizer, params):.4f}")
    package(args.out, config, params, tokenizer)
    print(f"saved in {args.out}")


if __name__ == "__main__":
    main()
