"""The rollout engine for tunix, over stand-ins for tunix's base class and flax; `make tunix` uses the real ones."""

from __future__ import annotations

import abc
import importlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jpaged.errors import InvalidArgument, Unsupported
from tests.e2e.rig import chosen_logprobs, generate, write_model
from tests.on_demand import programs_on_demand

NAMES = {
    r"model\.embed_tokens\.weight": ("embedder.input_embedding", None),
    r"model\.layers\.([0-9]+)\.self_attn\.(q|k|v)_proj\.weight": (r"layers.\1.attn.\2_proj.w", ((1, 0), None)),
    r"model\.layers\.([0-9]+)\.self_attn\.o_proj\.weight": (r"layers.\1.attn.o_proj.w", ((1, 0), None)),
    r"model\.layers\.([0-9]+)\.mlp\.(gate|up|down)_proj\.weight": (r"layers.\1.mlp.\2_proj.kernel", ((1, 0), None)),
    r"model\.norm\.weight": ("final_norm.w", None),
    r"model\.layers\.([0-9]+)\.(input|post_attention)_layernorm\.weight": (r"layers.\1.\2_layernorm.w", None),
    r"lm_head\.weight": ("lm_head.w", ((1, 0), None)),
}


@dataclass
class Output:
    text: list[str]
    logits: Any
    tokens: list[np.ndarray]
    left_padded_prompt_tokens: np.ndarray
    logprobs: list[np.ndarray] | None


class Base(abc.ABC):
    @abc.abstractmethod
    def generate(self, prompts: list[str], rollout_config: Any, **kwargs: Any) -> Any: ...

    @abc.abstractmethod
    def get_per_token_logps(self, prompt_tokens: Any, completion_tokens: Any) -> Any: ...

    @abc.abstractmethod
    def update_params(self, params: Any, filter_types: Any = None) -> None: ...

    @abc.abstractmethod
    def pad_id(self) -> int: ...

    @abc.abstractmethod
    def eos_id(self) -> int: ...

    @abc.abstractmethod
    def model(self) -> Any: ...


class Words:
    """A tokenizer of texts such as "7,8,"."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split(",") if word]

    def bos_id(self) -> int:
        return 1

    def dedup_bos_ids(self, ids: list[int]) -> list[int]:
        return ids[1:] if ids[:2] == [1, 1] else ids

    def pad_id(self) -> int:
        return 0

    def eos_id(self) -> int:
        return 2


@dataclass(frozen=True)
class Config:
    """The fields of tunix's config that are read."""

    max_tokens_to_generate: int = 6
    temperature: float = 1.0
    top_p: float | None = 1.0
    top_k: int | None = None
    seed: Any = None
    max_prompt_length: int = 8
    kv_cache_size: int = 32
    eos_tokens: list[int] | None = None
    return_logprobs: bool = True


def tunix_tree(tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    """The tensors as tunix has them: a tree with numbers for layers."""
    tree: dict[str, Any] = {}
    for name, tensor in tensors.items():
        ((new, how),) = [(re.sub(old, new, name), how) for old, (new, how) in NAMES.items() if re.fullmatch(old, name)]
        array = jnp.asarray(tensor if how is None else tensor.transpose(1, 0))
        if ".attn.o_proj" in new:
            array = array.reshape(2, -1, array.shape[-1])
        *path, last = (int(key) if key.isdigit() else key for key in new.split("."))
        place = tree
        for key in path:
            place = place.setdefault(key, {})
        place[last] = array
    return tree


@pytest.fixture
def tunix(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """`jpaged.tunix` over the stand-ins."""
    base: Any = ModuleType("tunix.rl.rollout.base_rollout")
    base.BaseRollout, base.RolloutOutput = Base, Output
    rollout: Any = ModuleType("tunix.rl.rollout")
    rollout.base_rollout = base
    flax: Any = ModuleType("flax")
    flax.nnx = SimpleNamespace(state=lambda actor, kind: actor.tree, Param=None)
    family: Any = ModuleType("family.params")
    family._get_key_and_transform_mapping = lambda config: NAMES
    for module in (ModuleType("tunix"), ModuleType("tunix.rl"), rollout, base, flax, ModuleType("family"), family):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "jpaged.tunix", raising=False)
    yield importlib.import_module("jpaged.tunix")
    sys.modules.pop("jpaged.tunix", None)


def actor_of(tree: dict[str, Any], module: str = "family.model") -> Any:
    return type("Actor", (), {"__module__": module, "tree": tree, "config": None})()


def open_rollout(tunix: ModuleType, folder: Path, tree: dict[str, Any], **options: Any) -> Any:
    few = {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 8, "num_blocks": 37, "block_size": 8}
    with programs_on_demand():
        return tunix.JpagedRollout(
            rollout_actor=actor_of(tree),
            tokenizer=Words(),
            rollout_config=Config(),
            model=str(folder),
            wait_for_all_programs=True,
            **{**few, **options},
        )


@pytest.mark.long
def test_samples_and_scores_are_those_of_the_actors_weights(tunix: ModuleType, tmp_path: Path) -> None:
    folder = write_model("llama_mha", tmp_path / "model", with_tokenizer=True)
    tensors = load_file(folder / "model.safetensors")
    doubled = {name: tensor * np.float32(1.5) for name, tensor in tensors.items()}
    rollout = open_rollout(tunix, folder, tunix_tree(doubled), linear_backend="xla")
    try:
        assert (rollout.pad_id(), rollout.eos_id(), rollout.model()) == (0, 2, None)
        output = rollout.generate(["7,8,", "7,8,", "1,9,10,11,"], Config(seed=jax.random.key(3)))
        assert output.left_padded_prompt_tokens.tolist() == [[0] * 5 + [1, 7, 8]] * 2 + [[0] * 4 + [1, 9, 10, 11]]
        assert output.text == ["".join(f"{n}," for n in row if n != 2) for row in output.tokens]
        assert output.logits is None and output.tokens[0].tolist() != output.tokens[1].tolist()
        again = rollout.generate(["7,8,", "7,8,", "1,9,10,11,"], Config(seed=np.array([0, 3], np.uint32)))
        assert [row.tolist() for row in again.tokens] == [row.tolist() for row in output.tokens]
        others = [rollout.generate(["7,8,"], Config()).tokens[0].tolist() for _ in range(2)]
        assert others[0] != others[1]  # without a seed

        completions = np.zeros((3, 8), np.int32)
        for row, tokens in zip(completions, output.tokens, strict=True):
            row[: len(tokens)] = tokens
        completions[1, 2:4] = [2, 5]  # nothing after an end counts
        scores = np.asarray(rollout.get_per_token_logps(output.left_padded_prompt_tokens, completions))
        for row in (0, 2):
            np.testing.assert_allclose(scores[row, : len(output.tokens[row])], output.logprobs[row], atol=1e-4)
            assert not scores[row, len(output.tokens[row]) :].any()
        assert scores[1, :3].all() and not scores[1, 3:].any()

        greedy = replace(Config(), temperature=0.0, return_logprobs=False)
        before = rollout.generate(["7,8,"], greedy)
        assert before.logprobs is None
        rollout.update_params(tunix_tree(tensors))
        assert rollout.llm.weight_version == "1"
        after = rollout.generate(["7,8,"], greedy).tokens[0].tolist()
        assert after != before.tokens[0].tolist()
        rollout.llm.update_weights(folder)
        (fresh,) = generate(rollout.llm, [[1, 7, 8]], rollout._sampling(Config(temperature=0.0), 0))
        assert list(fresh.token_ids) == after and len(chosen_logprobs(fresh)) == len(after)
    finally:
        rollout.llm.close()


@pytest.mark.long
def test_what_the_engine_cannot_do_for_tunix_is_refused(tunix: ModuleType, tmp_path: Path) -> None:
    folder = write_model("llama_mha", tmp_path / "model", with_tokenizer=True)
    tree = tunix_tree(load_file(folder / "model.safetensors"))
    rollout = open_rollout(tunix, folder, tree)
    try:
        for changed, field in (
            ({"temperature": 0.9}, "temperature"),
            ({"top_p": 0.5}, "top_p"),
            ({"top_k": 3}, "top_k"),
        ):
            with pytest.raises(Unsupported, match=f"return_logprobs: .* not of {field}"):
                rollout.generate(["7,"], replace(Config(), **changed))
        with pytest.raises(InvalidArgument, match=r"prompts: one has 10 tokens, over max_prompt_length \(8\)"):
            rollout.generate(["7,", "3," * 9], Config())
        with pytest.raises(InvalidArgument, match="beam_size: is not an argument"):
            rollout.generate(["7,"], Config(), beam_size=2)
        with pytest.raises(Unsupported, match=r"layers.0.attn.q_proj.w_lora_a is a LoRA weight"):
            rollout.update_params({"layers": {0: {"attn": {"q_proj": {"w_lora_a": jnp.ones((2, 2))}}}}})
        assert rollout.llm.weight_version == "0"
        del tree["final_norm"]
        with pytest.raises(Unsupported, match=r"to_hf: is required for Actor: no weight of it is model.norm.weight"):
            rollout.update_params(tree)
    finally:
        rollout.llm.close()


def test_a_family_without_names_requires_a_function(tunix: ModuleType, tmp_path: Path) -> None:
    folder = write_model("llama_mha", tmp_path / "model")
    with pytest.raises(Unsupported, match="to_hf: is required for Actor, because other has no names"):
        tunix._inverted_names(actor_of({}, "other.model"), str(folder))


def test_reshaped_weights_are_undone(tunix: ModuleType) -> None:
    tensor = np.arange(24.0).reshape(6, 4)
    changed = tensor.transpose(1, 0).reshape(4, 3, 2)
    np.testing.assert_array_equal(tunix._undo(changed, (6, 4), ((1, 0), (4, 3, 2))), tensor)
    np.testing.assert_array_equal(tunix._undo(tensor, (6, 4), None), tensor)
    assert [name for name, _ in tunix._dotted_names({"layers": {0: {"w": tensor}}})] == ["layers.0.w"]
