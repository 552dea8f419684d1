"""Rollout engine of google/tunix over `LLM`; requires the package google-tunix (extra `tunix`).

    ClusterConfig(rollout_engine=functools.partial(JpagedRollout, model="FOLDER"), ...)

tunix creates the engine with the actor, whose weights replace those of the folder at once and after each step.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from tunix.rl.rollout import base_rollout

from jpaged.checkpoints.hub import find_folder, read_config
from jpaged.checkpoints.names import model_leaves
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.llm import LLM, TokensPrompt
from jpaged.types import SamplingParams

NameWeights = Callable[[Mapping[str, jax.Array]], Mapping[str, jax.Array]]
Transform = tuple[Sequence[int] | None, Sequence[int] | None] | None
"""Permutation of a checkpoint's axes, then the shape in tunix; None keeps the tensor."""


class JpagedRollout(base_rollout.BaseRollout):  # type: ignore[misc, unused-ignore]
    """Samples for a trainer of tunix.

    Args:
        rollout_actor: the trainer's model.
        tokenizer: tunix's adapter of the trainer's tokenizer.
        mesh: of the role ROLLOUT. It is not used: the options of `LLM` choose the devices.
        rollout_config: its `kv_cache_size` is the default of `max_model_len`.
        model: folder or hub name of the same model, for its config and its tokenizer.
        to_hf: returns the actor's weights by Hugging Face's names, given those by tunix's dotted names. None inverts
            the names with which tunix loads the actor's family.
        options: of `LLM`.

    Raises:
        Unsupported: tunix has no such names for the actor's family.
    """

    def __init__(
        self,
        *,
        rollout_actor: Any,
        tokenizer: Any,
        mesh: Any = None,
        rollout_config: Any,
        model: str,
        to_hf: NameWeights | None = None,
        **options: Any,
    ) -> None:
        self._tokenizer = tokenizer
        self._to_hf = to_hf or _inverted_names(rollout_actor, model)
        self._seeds, self._num_updates = np.random.default_rng(options.get("seed", 0)), 0
        self.llm = LLM(model, **{"max_model_len": rollout_config.kv_cache_size, **options})
        from flax import nnx  # tunix requires it

        self.update_params(nnx.state(rollout_actor, nnx.Param))

    def generate(self, prompts: list[str], rollout_config: Any, **kwargs: Any) -> Any:
        """Return one sample for each prompt, of which several may be equal.

        Raises:
            InvalidArgument: a prompt is longer than `max_prompt_length`, or an argument is not of tunix.
            Unsupported: the sampling distribution is not the model's, but its log-probabilities are requested.
        """
        if kwargs:
            raise InvalidArgument(next(iter(kwargs)), "is not an argument of generate")
        if rollout_config.return_logprobs:
            _require_model_distribution(rollout_config)
        token_ids = [self._encode(prompt) for prompt in prompts]
        longest = max(map(len, token_ids), default=0)
        if longest > rollout_config.max_prompt_length:
            limit = f"over max_prompt_length ({rollout_config.max_prompt_length})"
            raise InvalidArgument("prompts", f"one has {longest} tokens, {limit}")
        rng = self._seeds if rollout_config.seed is None else np.random.default_rng(_words(rollout_config.seed))
        params = [self._sampling(rollout_config, int(seed)) for seed in rng.integers(2**31, size=len(prompts))]
        wrapped = [TokensPrompt(prompt_token_ids=ids) for ids in token_ids]
        samples = [output.outputs[0] for output in self.llm.generate(wrapped, params, use_tqdm=False)]
        padded = np.full((len(prompts), rollout_config.max_prompt_length), self.pad_id(), np.int32)
        for row, ids in zip(padded, token_ids, strict=True):
            row[len(row) - len(ids) :] = ids
        logprobs = None
        if rollout_config.return_logprobs:
            logprobs = [np.array([p.chosen.logprob for p in one.logprobs or ()], np.float32) for one in samples]
        return base_rollout.RolloutOutput(
            text=[one.text for one in samples],
            logits=None,
            tokens=[np.array(one.token_ids, np.int32) for one in samples],
            left_padded_prompt_tokens=padded,
            logprobs=logprobs,
        )

    def get_per_token_logps(self, prompt_tokens: Any, completion_tokens: Any) -> jax.Array:
        """Return the log-probability of each token of a completion, `[B, T]`; 0 for padding after its end."""
        prompts, completions = np.asarray(prompt_tokens), np.asarray(completion_tokens)
        pad_id, found = self.pad_id(), np.zeros(completions.shape, np.float32)
        pairs = []
        for prompt, completion in zip(prompts, completions, strict=True):
            begin = int((prompt != pad_id).argmax()) if (prompt != pad_id).any() else len(prompt)
            pairs.append((prompt[begin:].tolist(), completion[: self._num_tokens(completion)].tolist()))
        rows = [row for row, (_, completion) in enumerate(pairs) if completion]
        scores = self.llm.score_continuations(
            [TokensPrompt(prompt_token_ids=pairs[row][0]) for row in rows],
            [[pairs[row][1]] for row in rows],
            use_tqdm=False,
        )
        for row, (score,) in zip(rows, scores, strict=True):
            found[row, : len(score.tokens)] = [token.logprob for token in score.tokens]
        return jax.numpy.asarray(found)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Replace the weights, without a copy on the host where `LLM.update_weights` needs none.

        Raises:
            Unsupported: they are those of LoRA adapters.
        """
        named = dict(_dotted_names(params))
        adapters = [name for name in named if "_lora_" in name.rpartition(".")[2]]
        if adapters:
            raise Unsupported(f"update_params: {adapters[0]} is a LoRA weight; only complete weights are supported")
        self.llm.update_weights(self._to_hf(named), version=self._num_updates)
        self._num_updates += 1

    def pad_id(self) -> int:
        """Return the token that pads prompts."""
        return int(self._tokenizer.pad_id())

    def eos_id(self) -> int:
        """Return the token that ends a completion."""
        return int(self._tokenizer.eos_id())

    def model(self) -> None:
        """Return None: tunix would not update the weights of an engine that has the actor itself."""

    def _encode(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt as tunix's samplers do, with one token for its beginning."""
        begin = [self._tokenizer.bos_id()] if self._tokenizer.bos_id() else []
        return [*map(int, self._tokenizer.dedup_bos_ids([*begin, *self._tokenizer.encode(prompt)]))]

    def _sampling(self, config: Any, seed: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=config.max_tokens_to_generate,
            temperature=config.temperature,
            top_p=1.0 if config.top_p is None else config.top_p,
            top_k=-1 if config.top_k is None else config.top_k,
            stop_token_ids=tuple(config.eos_tokens or (self.eos_id(),)),
            logprobs=0 if config.return_logprobs else None,
            seed=seed,
        )

    def _num_tokens(self, completion: np.ndarray) -> int:
        """Return the length of a completion with its end, without padding."""
        ends = np.flatnonzero(completion == self.eos_id())
        if len(ends):
            return int(ends[0]) + 1
        tokens = np.flatnonzero(completion != self.pad_id())
        return int(tokens[-1]) + 1 if len(tokens) else 0


def _require_model_distribution(config: Any) -> None:
    """Raise Unsupported if tokens are sampled from another distribution than the model's."""
    for field, plain in (("temperature", (1.0,)), ("top_p", (None, 1.0)), ("top_k", (None, -1, 0))):
        if getattr(config, field) not in plain:
            raise Unsupported(
                f"return_logprobs: log-probabilities are those of the model, not of {field} {getattr(config, field)}; "
                f"set {field} to {plain[-1]}"
            )


def _words(seed: Any) -> list[int]:
    """Return the words of a seed, which is an integer or a key of JAX."""
    if isinstance(seed, jax.Array) and jax.numpy.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    return [int(word) for word in np.asarray(seed).reshape(-1)]


def _dotted_names(params: Any) -> Iterator[tuple[str, jax.Array]]:
    """Yield the arrays of a state of flax with tunix's names: `layers.0.attn.q_proj.w`."""
    for path, array in jax.tree_util.tree_flatten_with_path(params)[0]:
        keys = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
        yield ".".join(keys[:-1] if keys[-1] in {"value", "raw_value"} else keys), array


def _inverted_names(actor: Any, model: str) -> NameWeights:
    """Return a function that undoes how tunix loads a checkpoint of the actor's family."""
    family = type(actor).__module__.rpartition(".")[0]
    try:
        loader: Any = importlib.import_module(f"{family}.params")
        patterns: Mapping[str, tuple[str, Transform]] = loader._get_key_and_transform_mapping(actor.config)
    except (ImportError, AttributeError) as error:
        raise Unsupported(f"to_hf: is required for {type(actor).__name__}, because {family} has no names") from error
    leaves = model_leaves(read_config(find_folder(model)))
    shapes = dict(tensor for leaf in sum(leaves.layers, leaves.outer) for tensor in leaf.tensors)

    def name_weights(params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        named = {}
        for name, shape in shapes.items():
            found = [(re.sub(old, new, name), how) for old, (new, how) in patterns.items() if re.fullmatch(old, name)]
            if len(found) != 1 or found[0][0] not in params:
                raise Unsupported(f"to_hf: is required for {type(actor).__name__}: no weight of it is {name}")
            named[name] = _undo(params[found[0][0]], shape, found[0][1])
        return named

    return name_weights


def _undo(array: jax.Array, shape: tuple[int, ...], how: Transform) -> jax.Array:
    """Return a tensor of a checkpoint from a weight of tunix."""
    permutation = None if how is None else how[0]
    if permutation is None:
        return array.reshape(shape)
    return array.reshape([shape[axis] for axis in permutation]).transpose(np.argsort(permutation))
