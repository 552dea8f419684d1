"""Matrices of a GGUF model that stay quantized, and the format of each leaf.

Each type that `blocks.py` supports is kept without requantization. Matrices of one leaf (queries, keys and values;
gates and ups) with different types get the narrowest common format. If one of them is not quantized, or has an
unsupported type, the leaf is dequantized, as are routers and, on request, the token embedding.
"""

from __future__ import annotations

import dataclasses
import re
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jpaged.checkpoints.gguf.blocks import BLOCK_TYPES, joint_form
from jpaged.checkpoints.gguf.config import hf_config
from jpaged.checkpoints.gguf.file import GgufFile, open_gguf
from jpaged.checkpoints.gguf.tensors import GgufTensors, TensorLocation, places
from jpaged.checkpoints.names import model_leaves
from jpaged.checkpoints.quantized.scheme import MatrixPart, Parts, Shape, StoredMatrix, check_parts
from jpaged.checkpoints.tensor_files import StableFile
from jpaged.kernels.matmul.packed import StoredColumns
from jpaged.kernels.matrix_format import MatrixFormat
from jpaged.models.config import ModelConfig, Quantization
from jpaged.models.hf_config import from_hf
from jpaged.models.param_specs import Leaf, contracted_axis, get_module, is_matrix, stored_formats

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


def get_columns(files: GgufTensors, scheme: GgufScheme, leaf: Leaf, form: MatrixFormat) -> StoredColumns:
    """Return the columns of a leaf, which is no expert's, as rows of blocks in the file.

    Raises:
        InvalidArgument: a tensor of it is missing or misshapen.
    """
    place = len(leaf.shape) + contracted_axis(leaf)
    stored_axis = leaf.tensor_axes[place]
    assert stored_axis is not None
    numbered, tensors, num_rows = [], [], 0
    for name, shape in leaf.tensors:
        num_out, depth = shape if stored_axis == 1 else shape[::-1]
        check_parts(files, scheme.parts(get_module(name), (num_out, depth), form), (num_out, depth))
        tensors.append((name, files.places[name].rows, num_rows))
        numbered.append(np.swapaxes(np.arange(num_rows, num_rows + num_out)[:, None], stored_axis, 1))
        num_rows += num_out
    # The leaf's own order of columns, from a column of row numbers in place of weights.
    packed = np.empty((*leaf.shape[:place], 1, *leaf.shape[place + 1 :]), np.int64)
    leaf.pack(numbered, packed)
    return _columns(files, tensors, packed.reshape(-1))


def _columns(
    files: GgufTensors, tensors: Sequence[tuple[str, np.ndarray | None, int]], numbers: np.ndarray
) -> StoredColumns:
    """Return columns, by the numbers of their rows in several tensors.

    Args:
        tensors: name, index of each row in the file or None, and the number of the first row.
    """
    begins = np.array([begin for *_, begin in tensors])
    owners = np.searchsorted(begins, numbers, side="right") - 1
    rows = numbers - begins[owners]
    for index, (_, order, _) in enumerate(tensors):
        if order is not None:
            rows[owners == index] = order[rows[owners == index]]
    stored = [files.file.tensors[files.places[name].tensor] for name, *_ in tensors]
    row_bytes = [tensor.stored_shape[-1] for tensor in stored]
    buffers = threading.local()

    def buffer(num_bytes: int) -> np.ndarray:
        """Return this thread's memory, which the next call overwrites: mapping new pages takes as long as reading."""
        if len(getattr(buffers, "bytes", ())) < num_bytes:
            buffers.bytes = np.empty(num_bytes, np.uint8)
        memory: np.ndarray = buffers.bytes
        return memory

    def read(begin: int, end: int) -> tuple[np.ndarray, object]:
        own, at = owners[begin:end], rows[begin:end]
        among = [(i, at[own == i]) for i in range(len(stored))]
        spans = {i: (int(mine.min()), int(mine.max()) + 1) for i, mine in among if len(mine)}
        memory = buffer(sum((last - first) * row_bytes[i] for i, (first, last) in spans.items()))
        addresses, used = np.empty(end - begin, np.uint64), 0
        for i, (first, last) in spans.items():
            num_bytes = (last - first) * row_bytes[i]
            file = StableFile(stored[i].path, stored[i].state)
            try:
                file.fill(memory[used : used + num_bytes], stored[i].begin + first * row_bytes[i])
            finally:
                file.close()
            addresses[own == i] = memory.ctypes.data + used + (at[own == i] - first) * row_bytes[i]
            used += num_bytes
        return addresses, memory

    kinds = np.array([list(BLOCK_TYPES).index(tensor.kind) for tensor in stored], np.uint8)
    return StoredColumns(
        kinds[owners],
        max(row_bytes),
        read,
        lambda column: (str(stored[owners[column]].path), tensors[owners[column]][0]),
    )


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
