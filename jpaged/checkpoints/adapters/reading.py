"""An adapter's tensors -> its matrices as a model's programs take them, zeros where it has none.

    base_model.model.<module>.lora_A.weight    [rank, in]
    base_model.model.<module>.lora_B.weight    [out, rank]

A leaf's own `pack` lays B out: to it, B is a weight whose inputs are as many as the rank. So heads that are reordered
and projections that are fused come out as the matrix beside them does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jpaged.checkpoints.adapters.config import LoraConfig, read_lora_config
from jpaged.checkpoints.names import model_leaves
from jpaged.checkpoints.tensor_files import TensorFiles
from jpaged.checkpoints.tensor_source import read_weight
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.models.leaves import Leaf
from jpaged.models.lora import AdaptedPlace, HostAdapter, adapted_places, can_adapt
from jpaged.models.model import Model
from jpaged.models.quantisation.formats import module_of
from jpaged.models.registry import find_family
from jpaged.models.sharding import pad_for_sharding, padded_axis
from jpaged.models.stack import LayerMode

WEIGHTS_FILE = "adapter_model.safetensors"
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<which>[AB])(\.default)?\.weight")
_OUTER = frozenset({"model", "language_model", "transformer", "gpt_neox", "decoder"})
"""What may stand before the name of a layer: it depends on the class of the model that was trained."""

_Pair = dict[str, str]
"""The names of A and B."""


@dataclass(frozen=True, slots=True)
class AdapterReader:
    """Reads adapters for one model as it is served.

    Attributes:
        model: as published.
        layer_mode: how its layers run.
        num_parts: that it is split into.
        max_rank: that its adapter slots have.
    """

    model: Model
    layer_mode: LayerMode
    num_parts: int
    max_rank: int

    def __call__(self, path: str) -> HostAdapter:
        """Reads the folder that PEFT wrote.

        Raises:
            InvalidArgument: a file is missing or broken, a rank is above the limit, or a tensor is unknown, misshapen,
                without its other half or not finite; it is named.
            Unsupported: the adapter asks for something that is not computed; says what.
        """
        folder = Path(path).expanduser()
        if not folder.is_dir():
            raise InvalidArgument("lora", f"there is no folder {path}")
        config = read_lora_config(folder)
        if not (folder / WEIGHTS_FILE).is_file():
            pickles = sorted(folder.glob("*.bin"))
            if pickles:
                raise Unsupported(f"{pickles[0]}: pickles are not read: save the adapter with safe_serialization=True")
            raise InvalidArgument("lora", f"folder {path} has no {WEIGHTS_FILE}")
        with ExitStack() as opened:
            files = TensorFiles(folder, opened, WEIGHTS_FILE)
            return self._read(files, config, folder)

    def _read(self, files: TensorFiles, config: LoraConfig, folder: Path) -> HostAdapter:
        places = list(adapted_places(self.model.config, self.layer_mode))
        pairs = self._pairs(files, folder)
        known = {module_of(name) for place in places for leaf in place.leaves for name, _ in leaf.tensors}
        self._refuse_others(sorted(pairs.keys() - known), folder)
        for module, pair in pairs.items():
            rank = config.rank_of(module)
            if rank > self.max_rank:
                raise InvalidArgument("lora", f"{folder}: {module} has rank {rank}; max_lora_rank is {self.max_rank}")
            if len(pair) < 2:
                (which,) = {"A", "B"} - pair.keys()
                raise InvalidArgument("lora", f"{folder}: {module} has no lora_{which}.weight")
        source = _Source(files, config, pairs, self.max_rank, self.model.dtype)
        wide = adapted_places(pad_for_sharding(self.model.config, self.num_parts), self.layer_mode)
        return HostAdapter({each.path: self._matrices(each, to, source) for each, to in zip(places, wide, strict=True)})

    def _pairs(self, files: TensorFiles, folder: Path) -> dict[str, _Pair]:
        """The names of A and B of each module, by the name that it has in the model's own checkpoints."""
        family = find_family(self.model.config.architecture)
        prefix, pairs = family.name_prefix(()), dict[str, _Pair]()
        for name in sorted(files.names):
            found = _NAME.fullmatch(name)
            if found is None:
                raise Unsupported(
                    f"{folder}: tensor {name} is none of an adapter of linear modules "
                    "(base_model.model.<module>.lora_A.weight or lora_B.weight)"
                )
            module = found["module"]
            inner = module.split(".")
            while inner and inner[0] in _OUTER:
                inner = inner[1:]
            of_layer = family.layers_prefix.rstrip(".")
            full = f"{prefix}{'.'.join(inner)}" if inner and inner[0] == of_layer else module
            if found["which"] in pairs.setdefault(full, {}):
                raise InvalidArgument("lora", f"{folder}: tensor {name} is there twice")
            pairs[full][found["which"]] = name
        return pairs

    def _refuse_others(self, modules: Sequence[str], folder: Path) -> None:
        if not modules:
            return
        leaves = model_leaves(self.model.config)
        every = [leaf for each in (leaves.outer, *leaves.layers) for leaf in each]
        others = {module_of(name) for leaf in every if not can_adapt(leaf) for name, _ in leaf.tensors}
        shown = ", ".join(modules[:5])
        if any(module in others for module in modules):
            raise Unsupported(f"{folder}: {shown}: adapters are added to linear modules of layers alone, not to these")
        raise InvalidArgument("lora", f"{folder}: {shown}: no such module in {self.model.config.architecture}")

    def _matrices(
        self, place: AdaptedPlace, wide: AdaptedPlace, source: _Source
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
        """Those of a place of the published model, as the padded one has them."""
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
class _Source:
    """The tensors of one adapter, by the modules that they are of."""

    files: TensorFiles
    config: LoraConfig
    pairs: dict[str, _Pair]
    max_rank: int
    dtype: np.dtype

    def read(self, leaf: Leaf) -> tuple[np.ndarray, np.ndarray]:
        """A `[parts * rank, in]` and B `[rank, *out]` of the published leaf."""
        a = np.zeros((len(leaf.tensors) * self.max_rank, leaf.shape[0]), self.dtype)
        b = np.zeros((self.max_rank, *leaf.shape[1:]), self.dtype)
        if not any(module_of(name) in self.pairs for name, _ in leaf.tensors):
            return a, b
        in_axis = leaf.tensor_axes[0]
        outputs = []
        for part, (name, stored) in enumerate(leaf.tensors):
            num_out = stored[1 - in_axis] if in_axis is not None else stored[0]
            rows = np.zeros((num_out, self.max_rank), np.float32)
            pair = self.pairs.get(module_of(name))
            if pair is not None:
                module, rank = module_of(name), self.config.rank_of(module_of(name))
                begin = part * self.max_rank
                a[begin : begin + rank] = self._finite(pair["A"], (rank, leaf.shape[0]))
                rows[:, :rank] = self._finite(pair["B"], (num_out, rank)) * np.float32(self.config.scale_of(module))
            outputs.append(rows if in_axis == 1 else rows.T)
        leaf.pack(outputs, b)
        return a, b

    def _finite(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        stored = self.files.shape(name)
        where = str(self.files.where(name))
        if stored != shape:
            raise InvalidArgument(
                where, f"tensor {name} has shape {list(stored)}; model and rank make it {list(shape)}"
            )
        tensor = read_weight(self.files, name, shape).astype(np.float32)
        if not np.isfinite(tensor).all():
            raise InvalidArgument(where, f"tensor {name} has numbers that are not finite")
        return tensor
