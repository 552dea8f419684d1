"""Matrices of a GGUF model that stay quantized, and the format of each leaf.

Each type that `blocks.py` supports is kept without requantization. Matrices of one leaf (queries, keys and values;
gates and ups) with different types get the narrowest common format. If one of them is not quantized, or has an
unsupported type, the leaf is dequantized, as are routers and, on request, the token embedding.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jpaged.checkpoints.gguf.blocks import BLOCK_TYPES, joint_form
from jpaged.checkpoints.gguf.config import hf_config
from jpaged.checkpoints.gguf.file import GgufFile, open_gguf
from jpaged.checkpoints.gguf.tensors import GgufTensors, TensorLocation, places
from jpaged.checkpoints.names import model_leaves
from jpaged.checkpoints.quantized.scheme import MatrixPart, Parts, Shape, StoredMatrix
from jpaged.kernels.matrix_format import MatrixFormat
from jpaged.models.config import ModelConfig, Quantization
from jpaged.models.hf_config import from_hf
from jpaged.models.param_specs import Leaf, get_module, is_matrix, stored_formats

_METHOD = "gguf"
_EVERYTHING = Quantization(_METHOD, (("", MatrixFormat("int8")),), has_output=True, has_embedding=True)


@dataclass(frozen=True, slots=True)
class GgufScheme:
    """The layout of a GGUF model's quantized matrices.

    Attributes:
        kinds: GGUF type by module name.
    """

    quantization: Quantization
    kinds: Mapping[str, str]

    def parts(self, module: str, shape: Shape, form: MatrixFormat) -> Parts:
        """See `Scheme`; the key of a part is its type."""
        kind = self.kinds[module]
        block = BLOCK_TYPES[kind]
        num_out, depth = shape
        return {kind: MatrixPart(f"{module}.weight", ((num_out, depth // block.size * block.num_bytes),), ("uint8",))}

    def read(self, tensors: Mapping[str, np.ndarray], shape: Shape, form: MatrixFormat) -> StoredMatrix:
        """See `Scheme`."""
        ((kind, rows),) = tensors.items()
        return BLOCK_TYPES[kind].matrix(rows, form)


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A model in GGUF, with everything needed to load it.

    Attributes:
        config: as parsed by the family, with the quantization.
        hf: the same as a config.json.
        scheme: None if no matrix stays quantized.
    """

    file: GgufFile
    config: ModelConfig
    hf: Mapping[str, object]
    scheme: GgufScheme | None
    places: Mapping[str, TensorLocation]

    def tensors(self, *, as_weights: bool = False) -> GgufTensors:
        """Return its tensors; quantized ones for the scheme, or all of them as weights."""
        modules = () if self.scheme is None or as_weights else self.scheme.kinds
        return GgufTensors(self.file, self.places, frozenset(f"{module}.weight" for module in modules))


def read_model(path: Path, *, keeps_embedding: bool = True) -> GgufModel:
    """Return the model in a file.

    Args:
        keeps_embedding: the token embedding stays quantized, which a tied one does as the output matrix too.

    Raises:
        InvalidArgument: the file is broken, or something in it is missing or malformed.
        Unsupported: its architecture, or a setting, is not supported.
    """
    file = open_gguf(path)
    hf = hf_config(file)
    config = from_hf(hf)
    found = places(file, config.num_heads, config.num_kv_heads)
    formed = dict(_forms(config, file, found, keeps_embedding))
    if not formed:
        return GgufModel(file, config, hf, None, found)
    quantization = Quantization(_METHOD, _rules(formed), has_output=True, has_embedding=keeps_embedding)
    kinds = {module: _kind(file, found, f"{module}.weight") for module in formed}
    config = dataclasses.replace(config, quantization=quantization)
    return GgufModel(file, config, hf, GgufScheme(quantization, kinds), found)


def _forms(
    config: ModelConfig, file: GgufFile, found: Mapping[str, TensorLocation], keeps_embedding: bool
) -> Iterator[tuple[str, MatrixFormat]]:
    """Yield each module that stays quantized, and its format."""
    leaves = model_leaves(config, found)
    for leaf in (leaf for each in (leaves.outer, *leaves.layers) for leaf in each):
        if not _may_be_quantized(leaf) or (leaf.path[0] == "embed" and not keeps_embedding):
            continue
        kinds = [_kind(file, found, name) for name, _ in leaf.tensors]
        if all(kind in BLOCK_TYPES for kind in kinds):
            form = joint_form([BLOCK_TYPES[kind].form for kind in kinds])
            for name, _ in leaf.tensors:
                yield get_module(name), form


def _may_be_quantized(leaf: Leaf) -> bool:
    return is_matrix(leaf) and all(form is not None for form in stored_formats(_EVERYTHING, leaf))


def _kind(file: GgufFile, found: Mapping[str, TensorLocation], name: str) -> str:
    """Return the GGUF type of a tensor; empty if it does not exist."""
    return file.tensors[found[name].tensor].kind if name in found else ""


def _rules(forms: Mapping[str, MatrixFormat]) -> tuple[tuple[str, MatrixFormat | None], ...]:
    """Return rules that give each module its format: one rule for modules that differ only in their numbers.

    The first number of a name is the layer's. The second is an expert's; experts are one tensor with one format.
    """
    layers: dict[tuple[str, MatrixFormat], set[str]] = defaultdict(set)
    for module, form in forms.items():
        first, *others = re.split(r"(?<=\.)(\d+)(?=\.)", module, maxsplit=1)
        rest = re.sub(r"(?<=\.)\d+(?=\\.)", r"\\d+", re.escape(others[1])) if others else ""
        layers[f"^{re.escape(first)}{'(#)' if others else ''}{rest}$", form].update(others[:1])
    return tuple(
        (pattern.replace("#", "|".join(sorted(numbers, key=int))), form) for (pattern, form), numbers in layers.items()
    )
