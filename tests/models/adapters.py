"""Random adapters for tiny checkpoints, as PEFT writes them, and those checkpoints with one merged into them."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jpaged.models.hf_config import from_hf
from jpaged.models.lora import adapted_places, is_of_experts
from jpaged.models.param_specs import Leaf
from tests.models.tiny import TinyCase, tensors, write_checkpoint

EMBEDDING = "model.embed_tokens"
REPLACED_ROWS = f"base_model.model.{EMBEDDING}.token_adapter.trainable_tokens_delta"


@dataclass(frozen=True, slots=True)
class TinyAdapter:
    """An adapter of a tiny checkpoint.

    Attributes:
        name: seeds its numbers.
        modules: a regular expression of the modules that it is of.
        settings: what its adapter_config.json says besides.
        has_output: it is of lm_head, too.
        has_input: it is of embed_tokens, too.
        tokens: ids whose rows of embed_tokens it replaces; those of a tied lm_head, too.
    """

    case: TinyCase
    name: str
    rank: int = 4
    alpha: float = 6.0
    modules: str = ""
    settings: Mapping[str, object] | None = None
    has_output: bool = False
    has_input: bool = False
    tokens: tuple[int, ...] = ()

    def module_names(self) -> list[str]:
        """Every module that may have an adapter, as the checkpoint calls it, and this one has."""
        config = from_hf(self.case.config)
        places = adapted_places(config, "loop", has_output=self.has_output, has_input=self.has_input)
        names = [name.removesuffix(".weight") for place in places for leaf in place.leaves for name, _ in leaf.tensors]
        return [name for name in dict.fromkeys(names) if re.search(self.modules, name)]

    def config(self) -> dict[str, object]:
        """As PEFT writes it, with fields that are without effect."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": "tiny",
            "inference_mode": True,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.05,
            "bias": "none",
            "use_dora": False,
            "use_rslora": False,
            "fan_in_fan_out": self.is_transposed,
            "init_lora_weights": True,
            "modules_to_save": None,
            "target_modules": sorted({name.rpartition(".")[2] for name in self.module_names()}),
            "rank_pattern": {},
            "alpha_pattern": {},
            "trainable_token_indices": list(self.tokens) or None,
            **(self.settings or {}),
        }

    @property
    def is_transposed(self) -> bool:
        """Whether weights are `[in, out]`."""
        return self.case.config["model_type"] == "gpt2"

    def tensors(self) -> dict[str, np.ndarray]:
        """Under the names that PEFT gives them."""
        stored, found = tensors(self.case), dict[str, np.ndarray]()
        for module in self.module_names():
            shape = stored[self._find(stored, module)].shape
            num_out, width = shape[::-1] if self.is_transposed else shape
            rng = np.random.default_rng(zlib.crc32(f"{self.case.name}/{self.name}/{module}".encode()))
            prefix = f"base_model.model.{module}"
            if module == EMBEDDING:
                num_out, width = width, num_out
            for which, shape, std in (("A", (self.rank, width), 0.3), ("B", (num_out, self.rank), 0.1)):
                found[self._names(module)[which]] = rng.normal(0, std, shape).astype(np.float32)
            given = self.config()
            if given["use_dora"]:
                magnitudes = rng.uniform(0.2, 2.0, (num_out,))
                found[f"{prefix}.lora_magnitude_vector"] = magnitudes.astype(np.float32)
            if given.get("lora_bias"):
                found[f"{prefix}.lora_B.bias"] = rng.normal(0, 0.2, (num_out,)).astype(np.float32)
            if given["bias"] != "none" and f"{module}.bias" in stored:
                found[f"{prefix}.base_layer.bias"] = rng.normal(0, 0.2, (num_out,)).astype(np.float32)
        if self.tokens:
            rng, width = np.random.default_rng(len(self.tokens)), stored[f"{EMBEDDING}.weight"].shape[1]
            found[REPLACED_ROWS] = rng.normal(0, 0.1, (len(self.tokens), width)).astype(np.float32)
        return found

    @staticmethod
    def _names(module: str) -> dict[str, str]:
        """Names of A and B."""
        form = "lora_embedding_{}" if module == EMBEDDING else "lora_{}.weight"
        return {which: f"base_model.model.{module}.{form.format(which)}" for which in "AB"}

    @staticmethod
    def _find(stored: Mapping[str, np.ndarray], module: str) -> str:
        """The name of a module's weight, which a checkpoint may have renamed; without one, that of the embedding."""
        renamed = (module, module.replace("model.", "backbone.", 1), module.replace(".mlp.", ".block_sparse_moe."))
        return next((f"{name}.weight" for name in renamed if f"{name}.weight" in stored), f"{EMBEDDING}.weight")

    def write(self, folder: Path, **changed: object) -> str:
        """Writes the folder, with other values in its config; its path."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps({**self.config(), **changed}), encoding="utf-8")
        save_file(self.tensors(), folder / "adapter_model.safetensors", metadata={"format": "pt"})
        return str(folder)

    def write_merged(self, folder: Path) -> Path:
        """Writes the checkpoint with the adapter added to its weights; an lm_head may be untied for it."""
        write_checkpoint(self.case, folder)
        if self.has_output or self.has_input:
            untied = {**self.case.config, "tie_word_embeddings": False}
            (folder / "config.json").write_text(json.dumps(untied), encoding="utf-8")
        own, merged = self.tensors(), tensors(self.case)
        if self.has_input:
            merged.setdefault("lm_head.weight", merged[f"{EMBEDDING}.weight"])
        if self.tokens:
            merged[f"{EMBEDDING}.weight"] = merged[f"{EMBEDDING}.weight"].copy()
            merged[f"{EMBEDDING}.weight"][list(self.tokens)] = own[REPLACED_ROWS]
        for module in self.module_names():
            a, b = (own[self._names(module)[which]].astype(np.float64) for which in "AB")
            delta = b @ a * (self.alpha / self.rank)
            if module == EMBEDDING:
                merged[f"{module}.weight"] = (merged[f"{module}.weight"] + delta.T).astype(np.float32)
                continue
            name, prefix = self._find(merged, module), f"base_model.model.{module}"
            stored, name = merged[name], f"{module}.weight" if name == f"{EMBEDDING}.weight" else name
            weight = (stored.T if self.is_transposed else stored) + delta
            if (magnitudes := own.get(f"{prefix}.lora_magnitude_vector")) is not None:
                weight = weight * (magnitudes / np.linalg.norm(weight, axis=1))[:, None]
            merged[name] = np.ascontiguousarray(weight.T if self.is_transposed else weight, np.float32)
            bias = own.get(f"{prefix}.base_layer.bias", merged.get(f"{module}.bias"))
            if (added := own.get(f"{prefix}.lora_B.bias")) is not None:
                bias = (0 if bias is None else bias) + added * np.float32(self.alpha / self.rank)
            if bias is not None:
                merged[f"{module}.bias"] = bias
        save_file(merged, folder / "model.safetensors", metadata={"format": "pt"})
        return folder


@dataclass(frozen=True, slots=True)
class ExpertAdapter:
    """An adapter of the experts of a tiny checkpoint and of their routers, as PEFT writes `target_parameters`.

    Attributes:
        is_early: as releases before 0.19 write it: experts are taken for `[experts, in, out]`, as those of gpt-oss are.
    """

    case: TinyCase
    name: str
    rank: int = 3
    alpha: float = 6.0
    is_early: bool = False

    def config(self) -> dict[str, object]:
        """As PEFT writes it."""
        parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]
        plain = {"peft_type": "LORA", "r": self.rank, "lora_alpha": self.alpha, "target_modules": []}
        return plain | {"target_parameters": parameters, "peft_version": "0.18.1" if self.is_early else "0.19.0"}

    def _leaves(self) -> list[Leaf]:
        """The matrices of gates, of downs and of the routers."""
        places = adapted_places(from_hf(self.case.config), "loop", has_experts=True)
        leaves = [leaf for place in places for leaf in place.leaves if is_of_experts(leaf)]
        return [leaf for leaf in leaves if leaf.path[-2] in ("gate", "down", "router")]

    def _pair(self, leaf: Leaf) -> tuple[np.ndarray, np.ndarray]:
        """A `[experts, rank, in]` and B `[experts, out, rank]`; gates and ups are joined."""
        *num_experts, inputs, outputs = leaf.shape
        rng = np.random.default_rng(zlib.crc32(f"{self.name}/{leaf.tensors[0][0]}".encode()))
        experts, outputs = (num_experts or [1])[0], outputs * (2 if leaf.path[-2] == "gate" else 1)
        a = rng.normal(0, 0.3, (experts, self.rank, inputs)).astype(np.float32)
        return a, rng.normal(0, 0.15, (experts, outputs, self.rank)).astype(np.float32)

    def write(self, folder: Path) -> str:
        """Writes the folder; its path."""
        found = {}
        for leaf in self._leaves():
            a, b = self._pair(leaf)
            if self.is_early and leaf.path[-2] != "router":
                a, b = b.swapaxes(1, 2), a.swapaxes(1, 2)
            layer = re.match(r".*?\.\d+\.", leaf.tensors[0][0])
            assert layer is not None
            end = {"gate": "experts.base_layer", "down": "experts", "router": "gate"}[leaf.path[-2]]
            name = f"base_model.model.{layer[0]}mlp.{end}"
            found[f"{name}.lora_A.weight"] = a.reshape(-1, a.shape[2])
            found[f"{name}.lora_B.weight"] = b.transpose(1, 2, 0).reshape(b.shape[1], -1)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps(self.config()), encoding="utf-8")
        tensors = {name: np.ascontiguousarray(tensor) for name, tensor in found.items()}
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        return str(folder)

    def write_merged(self, folder: Path) -> Path:
        """Writes the checkpoint with the adapter added to its weights."""
        write_checkpoint(self.case, folder)
        merged = tensors(self.case)
        for leaf in self._leaves():
            a, b = self._pair(leaf)
            delta = b @ a * np.float32(self.alpha / self.rank)
            names = [name for name, _ in leaf.tensors]
            if len(names) < len(delta):  # gpt-oss: one tensor, [experts, in, out]
                merged[names[0]] = merged[names[0]] + delta.swapaxes(1, 2)
                continue
            parts = np.split(delta, 2, axis=1) if leaf.path[-2] == "gate" else [delta]
            ups = [name.replace("gate_proj", "up_proj").replace(".w1.", ".w3.") for name in names]
            for of_each, part in zip((names, ups), parts, strict=False):
                for name, one in zip(of_each, part, strict=True):
                    merged[name] = merged[name] + one
        save_file(merged, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
