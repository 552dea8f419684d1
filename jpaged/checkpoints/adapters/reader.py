"""An adapter's tensors -> matrices in the layout of a model's programs, with zeros for modules without an adapter.

    base_model.model.<module>.lora_A.weight    [rank, in]
    base_model.model.<module>.lora_B.weight    [out, rank]

The leaf's `pack` converts B like a weight with `rank` inputs. So reordered heads and fused projections get the same
layout as the base matrix.

Modules that do not support adapters are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jpaged.checkpoints.adapters.config import MAX_NAME_LEN, LoraConfig, read_lora_config
from jpaged.checkpoints.hub import expand_home
from jpaged.checkpoints.names import is_ignored, model_leaves
from jpaged.checkpoints.tensor_files import TensorFiles, read_weight
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.models.config import ModelConfig
from jpaged.models.lora import AdaptedPlace, HostAdapter, adapted_places, is_of_experts
from jpaged.models.model import Model
from jpaged.models.param_specs import Leaf, get_module
from jpaged.models.registry import find_family
from jpaged.models.sharding import pad_for_sharding, padded_axis
from jpaged.models.stack import LayerMode

_MAX_SHOWN = 5
_OUTER_MODULES = frozenset({"lm_head", "embed_out", "embed_tokens", "embed_in", "wte", "wpe", "word_embeddings"})
_NOT_OUTER = "adapters of embeddings and lm_head are not supported; merge the adapter into the model"
_ROUTERS = frozenset({"gate", "router"})


def refuse_others(modules: Sequence[str], config: ModelConfig, folder: Path) -> None:
    """Raise an error for modules that do not support adapters; no-op for an empty list.

    Raises:
        Unsupported: the model has some of them; the message has the reason.
        InvalidArgument: the model has none of them.
    """
    if not modules:
        return
    leaves = model_leaves(config)
    every = [leaf for each in (leaves.outer, *leaves.layers) for leaf in each]
    has_experts = any(map(is_of_experts, every))
    known = {get_module(name) for leaf in every for name, _ in leaf.tensors}
    kinds: tuple[tuple[Callable[[str], bool], str], ...] = (
        (lambda module: has_experts and _is_of_experts(module), "adapters of experts and routers are not supported"),
        (lambda module: _get_words(module)[-1] in _OUTER_MODULES, _NOT_OUTER),
        (known.__contains__, "adapters are supported only for linear modules of layers"),
        (lambda module: is_ignored(f"{module}.weight", config), "the server does not load these modules of the model"),
    )
    for is_of_kind, why in kinds:
        found = [module for module in modules if is_of_kind(module)]
        if found:
            raise Unsupported(f"{folder}: {_listed(found)}: {why}; train the adapter without them")
    raise InvalidArgument("lora", f"{folder}: {_listed(modules)}: no such module in {config.architecture}")


def _get_words(module: str) -> list[str]:
    return module.split(".")


def _is_of_experts(module: str) -> bool:
    """Return True if the name is that of experts, which varies between releases of transformers."""
    words = module.split(".")
    return "experts" in words or words[-1] in _ROUTERS


def _listed(modules: Sequence[str]) -> str:
    shown, num_more = ", ".join(modules[:_MAX_SHOWN]), len(modules) - _MAX_SHOWN
    return f"{shown} and {num_more} more" if num_more > 0 else shown


WEIGHTS_FILE = "adapter_model.safetensors"
_MAX_HEADER_BYTES = 1 << 24
"""Limit of the header of that file, which a running server parses: about 100,000 tensors."""
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<which>[AB])(\.default)?\.weight")
_OF_EMBEDDING = re.compile(r"\.lora_embedding_[AB](\.|$)|(^|\.)(embed_\w+|wte|wpe|lm_head|embed_out)\.")
_OUTER = frozenset({"model", "language_model", "transformer", "gpt_neox", "decoder"})
"""Possible prefixes of a layer's name, depending on the class of the trained model."""


@dataclass(frozen=True, slots=True)
class _Tensors:
    """The tensors of a module: its name in the trained model, and the names of A and B."""

    trained: str
    names: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Pair:
    """The tensors A and B of a module, their rank, and the factor of their product."""

    a: str
    b: str
    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterReader:
    """Reads adapters for one served model.

    Attributes:
        model: as published.
        layer_mode: how its layers run.
        num_parts: number of parts that it is split into.
        max_rank: rank of the adapter slots.
    """

    model: Model
    layer_mode: LayerMode
    num_parts: int
    max_rank: int

    def __call__(self, path: str) -> HostAdapter:
        """Read a folder that PEFT wrote.

        Raises:
            InvalidArgument: a file is missing, broken or incomplete, a rank is above the limit, or a tensor is unknown,
                misshapen, without its other half or not finite after scaling; it is named.
            Unsupported: the adapter needs an unsupported feature, which the message names.
        """
        folder = expand_home(path, "lora")
        if not folder.is_dir():
            raise InvalidArgument("lora", f"folder {path} does not exist")
        config = read_lora_config(folder)
        if not (folder / WEIGHTS_FILE).is_file():
            pickles = sorted(folder.glob("*.bin"))
            if pickles:
                raise Unsupported(
                    f"{pickles[0]}: pickles are not supported: save the adapter with safe_serialization=True"
                )
            raise InvalidArgument("lora", f"folder {path} has no {WEIGHTS_FILE}")
        with ExitStack() as opened:
            files = TensorFiles(folder, opened, WEIGHTS_FILE, _MAX_HEADER_BYTES)
            return self._read(files, config, folder)

    def _read(self, files: TensorFiles, config: LoraConfig, folder: Path) -> HostAdapter:
        places = list(adapted_places(self.model.config, self.layer_mode))
        tensors = self._tensors(files, folder)
        known = {get_module(name) for place in places for leaf in place.leaves for name, _ in leaf.tensors}
        refuse_others(sorted(tensors.keys() - known), self.model.config, folder)
        _refuse_incomplete(config.targets, known, [each.trained for each in tensors.values()], folder)
        pairs = {module: self._pair(module, each, config, folder) for module, each in tensors.items()}
        source = _AdapterTensors(files, pairs, self.max_rank, self.model.dtype)
        wide = adapted_places(pad_for_sharding(self.model.config, self.num_parts), self.layer_mode)
        return HostAdapter({each.path: self._matrices(each, to, source) for each, to in zip(places, wide, strict=True)})

    def _tensors(self, files: TensorFiles, folder: Path) -> dict[str, _Tensors]:
        """Return the tensors of each module, by its name in the model's checkpoints."""
        family = find_family(self.model.config.architecture)
        prefix, found = family.name_prefix(()), dict[str, _Tensors]()
        for name in sorted(files.names):
            parts = _NAME.fullmatch(name)
            if parts is None and _OF_EMBEDDING.search(name):
                raise Unsupported(
                    f"{folder}: tensor {name}: adapters and replacements of embeddings and lm_head are not supported: "
                    "merge the adapter into the model, or train it without them"
                )
            if parts is None:
                raise Unsupported(
                    f"{folder}: tensor {name} is not part of an adapter of a linear module "
                    "(base_model.model.<module>.lora_A.weight or lora_B.weight)"
                )
            if len(name) > MAX_NAME_LEN:
                problem = f"{folder}: the name of a tensor has {len(name)} characters; the limit is {MAX_NAME_LEN}"
                raise InvalidArgument("lora", problem)
            trained = parts["module"]
            inner = trained.split(".")
            while inner and inner[0] in _OUTER:
                inner = inner[1:]
            of_layer = family.layers_prefix.rstrip(".")
            module = f"{prefix}{'.'.join(inner)}" if inner and inner[0] == of_layer else trained
            names = found.setdefault(module, _Tensors(trained, {})).names
            if parts["which"] in names:
                raise InvalidArgument("lora", f"{folder}: tensor {name} is present twice")
            names[parts["which"]] = name
        if not found:
            raise InvalidArgument("lora", f"{folder}: {WEIGHTS_FILE} has no tensors: save the adapter again")
        return found

    def _pair(self, module: str, tensors: _Tensors, config: LoraConfig, folder: Path) -> _Pair:
        rank = config.get_rank(tensors.trained)
        if rank > self.max_rank:
            raise InvalidArgument("lora", f"{folder}: {module} has rank {rank}; max_lora_rank is {self.max_rank}")
        for which in "AB":
            if which not in tensors.names:
                raise InvalidArgument("lora", f"{folder}: {module} has no lora_{which}.weight")
        return _Pair(tensors.names["A"], tensors.names["B"], rank, config.get_scale(tensors.trained, rank))

    def _matrices(
        self, place: AdaptedPlace, wide: AdaptedPlace, source: _AdapterTensors
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
        """Return the matrices of a place of the published model, in the layout of the padded model."""
        each_a, each_b = [], list[tuple[np.ndarray, ...]]()
        for leaf in place.leaves:
            a, b = source.read(leaf)
            split = padded_axis(leaf, self.num_parts)
            if split is not None and split.axis > 0:  # its inputs are never padded
                b = split.padded(b, 0, split.wide_size)
            each_a.append(a)
            each_b.append(wide.split(b))
        if not place.is_stacked:
            return each_a[0], each_b[0]
        return np.stack(each_a), tuple(np.stack(parts) for parts in zip(*each_b, strict=True))


@dataclass(frozen=True, slots=True)
class _AdapterTensors:
    """The tensors of one adapter, by module."""

    files: TensorFiles
    pairs: Mapping[str, _Pair]
    max_rank: int
    dtype: np.dtype

    def read(self, leaf: Leaf) -> tuple[np.ndarray, np.ndarray]:
        """Return A `[parts * rank, in]` and B `[rank, *out]` of the published leaf."""
        a = np.zeros((len(leaf.tensors) * self.max_rank, leaf.shape[0]), self.dtype)
        b = np.zeros((self.max_rank, *leaf.shape[1:]), self.dtype)
        if not any(get_module(name) in self.pairs for name, _ in leaf.tensors):
            return a, b
        in_axis = leaf.tensor_axes[0]
        outputs = []
        for part, (name, stored) in enumerate(leaf.tensors):
            num_out = stored[1 - in_axis] if in_axis is not None else stored[0]
            rows = np.zeros((num_out, self.max_rank), np.float32)
            pair = self.pairs.get(get_module(name))
            if pair is not None:
                begin = part * self.max_rank
                a[begin : begin + pair.rank] = self._finite(pair.a, (pair.rank, leaf.shape[0]))
                rows[:, : pair.rank] = self._finite(pair.b, (num_out, pair.rank), pair.scale)
            outputs.append(rows if in_axis == 1 else rows.T)
        leaf.pack(outputs, b)
        return a, b

    def _finite(self, name: str, shape: tuple[int, ...], scale: float = 1.0) -> np.ndarray:
        """Return a scaled tensor in the model's type. It must be finite, because other values would reach every row."""
        stored = self.files.shape(name)
        where = str(self.files.where(name))
        if stored != shape:
            raise InvalidArgument(
                where, f"tensor {name} has shape {list(stored)}; model and rank require {list(shape)}"
            )
        with np.errstate(over="ignore", invalid="ignore"):
            tensor = read_weight(self.files, name, shape).astype(np.float32) * np.float32(scale)
            tensor = tensor.astype(self.dtype)
        if not np.isfinite(tensor).all():
            raise InvalidArgument(where, f"tensor {name} times {scale:g} has non-finite numbers in {self.dtype.name}")
        return tensor


def _refuse_incomplete(targets: Iterable[str], modules: Set[str], trained: Iterable[str], folder: Path) -> None:
    """Raise an error if an adapter lacks tensors of target modules that the model has.

    Targets that the model does not have are ignored: lists may cover several models, and vision parts.
    """
    expected, found = _ends(modules), _ends(trained)
    for target in targets:
        if target in expected and target not in found:
            raise InvalidArgument(
                "lora",
                f"{folder}: target_modules has {target!r}, but {WEIGHTS_FILE} has no tensors for such a module: save "
                "the adapter again",
            )


def _ends(modules: Iterable[str]) -> frozenset[str]:
    """Return the names and all their suffixes that start after a dot."""
    words = [module.split(".") for module in modules]
    return frozenset(".".join(each[begin:]) for each in words for begin in range(len(each)))
