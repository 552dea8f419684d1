r"""Adapters (LoRA) in files, as PEFT writes them: adapter_config.json, and the matrices of adapter_model.safetensors.

    base_model.model.<module>.lora_A.weight    [rank, in]
    base_model.model.<module>.lora_B.weight    [out, rank]

With room for vectors (`enable_dora`), also DoRA and biases:

    base_model.model.<module>.lora_magnitude_vector    [out]    m
    base_model.model.<module>.lora_B.bias              [out]    c: lora_bias
    base_model.model.<module>.base_layer.bias          [out]    b', in place of the base's b: bias is all or lora_only

The result is g (W x + s B A x) + s c + b', with g = m / |W + s B A|, the norm of each output's row. So B is stored
times s g, and the vectors are g - 1 and s c + b' - b. W and b are read from the model's checkpoint.

With room for the embedding (`enable_embedding_lora`) and the output matrix (`enable_lm_head_lora`), also:

    base_model.model.<module>.lora_embedding_A    [rank, vocabulary]
    base_model.model.<module>.lora_embedding_B    [width, rank]
    base_model.model.<module>.token_adapter.trainable_tokens_delta    [ids, width]    rows: trainable_token_indices
    base_model.model.<module>.weight    [vocabulary, width]    a copy of the matrix: modules_to_save

Replaced rows are an adapter whose rank is their number: a one for each id, and the differences from the model's rows.
So a copy is served if it differs from the model's matrix in at most `max_lora_rank` rows.

With room for experts (`enable_expert_lora`), also target_parameters. A module with several parameters has nested names:

    base_model.model.<experts>[.base_layer].lora_A.weight    [experts * rank, in]    expert after expert
    base_model.model.<experts>[.base_layer].lora_B.weight    [out, rank * experts]    rank after rank

The parameter follows from the sizes: those of gates and ups together, or of downs. Early releases of PEFT exchange in
and out.

The leaf's `pack` converts B like a weight with `rank` inputs. So reordered heads and fused projections get the same
layout as the base matrix. Modules without an adapter get zeros. Modules that do not support adapters are refused, as
are unsupported settings.

`rank_pattern` and `alpha_pattern` are regular expressions of module names, each with a number. As in PEFT, the first
pattern counts that matches the end of a name, from a dot on: `(.*\.)?(pattern)$`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from jpaged.checkpoints.hub import expand_home, read_json, read_scheme
from jpaged.checkpoints.names import is_ignored, model_leaves
from jpaged.checkpoints.quantized.leaf import Dequantized
from jpaged.checkpoints.tensor_files import TensorFiles, TensorSource, read_weight
from jpaged.checkpoints.weights import open_tensors
from jpaged.errors import InvalidArgument, NotFound, Unsupported
from jpaged.models.config import ModelConfig
from jpaged.models.json_fields import JsonFields
from jpaged.models.lora import (
    INPUT_PATH,
    NOT_EXPERTS,
    OUTER_MODULES,
    OUTPUT_MODULES,
    REMEDY,
    WITHOUT_VECTORS,
    AdaptedPlace,
    HostAdapter,
    LoraConfig,
    adapted_places,
    get_words,
    is_of_experts,
    parse_lora_config,
)
from jpaged.models.model import Model
from jpaged.models.param_specs import Leaf, get_module
from jpaged.models.registry import find_family
from jpaged.models.sharding import pad_for_sharding, padded_axis
from jpaged.models.stack import LayerMode

_FLOAT32 = np.dtype(np.float32)

MAX_NAME_LEN = 200
"""Maximum characters of a tensor's name; PEFT's have up to about 110."""

CONFIG_FILE = "adapter_config.json"
MAX_CONFIG_BYTES = 1 << 20
"""Limit of adapter_config.json: a running server parses it, which holds Python's lock for about 10 ms."""


def read_lora_config(folder: Path, *, has_vectors: bool = False, has_experts: bool = False) -> LoraConfig:
    """Read the config in an adapter's folder; see `parse_lora_config`.

    Raises:
        InvalidArgument: it is missing.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise InvalidArgument(
            "lora", f"folder {folder} has no {CONFIG_FILE}; it must be in the layout that PEFT writes"
        )
    fields = JsonFields(read_json(path, MAX_CONFIG_BYTES), str(path))
    return parse_lora_config(fields, has_vectors=has_vectors, has_experts=has_experts)


_MAX_SHOWN = 5
_NOT_OUTPUT = (
    "adapters of lm_head are not supported without enable_lm_head_lora: start the server with --enable-lm-head-lora, "
    "or merge the adapter into the model"
)
_NOT_INPUT = (
    "adapters of embeddings are not supported, except those of embed_tokens with enable_embedding_lora: start the "
    "server with --enable-embedding-lora, or merge the adapter into the model"
)
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
        (lambda module: has_experts and _is_of_experts(module), NOT_EXPERTS),
        (lambda module: get_words(module)[-1] in OUTPUT_MODULES, _NOT_OUTPUT),
        (lambda module: get_words(module)[-1] in OUTER_MODULES, _NOT_INPUT),
        (known.__contains__, "adapters are supported only for linear modules of layers"),
        (lambda module: is_ignored(f"{module}.weight", config), "the server does not load these modules of the model"),
    )
    for is_of_kind, why in kinds:
        found = [module for module in modules if is_of_kind(module)]
        if found:
            raise Unsupported(f"{folder}: {_listed(found)}: {why}; train the adapter without them")
    raise InvalidArgument("lora", f"{folder}: {_listed(modules)}: no such module in {config.architecture}")


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
_NAME = re.compile(
    r"base_model\.model\.(?P<module>.+)\.lora_(embedding_)?(?P<which>[AB])(?(2)(\.default)?|(\.default)?\.weight)"
)
_VECTOR = re.compile(
    r"base_model\.model\.(?P<module>.+?)\."
    r"((?P<magnitude>lora_magnitude_vector(\.default)?(\.weight)?)|(?P<added>lora_B(\.default)?\.bias)"
    r"|(?P<bias>(base_layer\.)?bias))"
)
_OF_EMBEDDING = re.compile(r"(^|\.)(embed_\w+|wte|wpe|lm_head|embed_out)\.")
_REPLACED_ROWS = re.compile(
    r"base_model\.model\.([\w.]+?\.)??(?P<word>\w+)\.token_adapter\.trainable_tokens_delta(\.default)?"
)
_SAVED_MODULE = re.compile(
    r"base_model\.model\.([\w.]+?\.)??(?P<word>\w+)(\.base_layer|\.modules_to_save(\.default)?)?\.weight"
)
_OUTER = frozenset({"model", "language_model", "transformer", "gpt_neox", "decoder", "backbone"})
"""Possible prefixes of a layer's name, depending on the class of the trained model."""


@dataclass(frozen=True, slots=True)
class _Tensors:
    """The tensors of a module: its name in the trained model, and the names of A, B, magnitude, added and bias."""

    trained: str
    names: dict[str, str]

    @property
    def has_matrices(self) -> bool:
        """True unless the module has only a bias."""
        return self.names.keys() != {"bias"}


@dataclass(frozen=True, slots=True)
class _Pair:
    """The tensors A and B of a module, their rank, and the factor of their product; the rank is 0 without them.

    Attributes:
        vectors: names of the tensors magnitude, added and bias, those that it has.
    """

    a: str
    b: str
    rank: int
    scale: float
    vectors: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class AdapterReader:
    """Reads adapters for one served model.

    Attributes:
        model: as published.
        layer_mode: how its layers run.
        num_parts: number of parts that it is split into.
        max_rank: rank of the adapter slots.
        has_vectors: slots have room for DoRA and biases.
        has_output: the output matrix has slots.
        has_input: the embedding has slots.
        has_experts: experts and routers have slots.
        checkpoint: of the model; None if its weights are random, which supports no DoRA and no trained biases.
    """

    model: Model
    layer_mode: LayerMode
    num_parts: int
    max_rank: int
    has_vectors: bool = False
    has_output: bool = False
    has_input: bool = False
    has_experts: bool = False
    checkpoint: Path | None = None

    def __call__(self, path: str) -> HostAdapter:
        """Read a folder that PEFT wrote.

        Raises:
            NotFound: the folder does not exist.
            InvalidArgument: a file is missing, broken or incomplete, a rank is above the limit, or a tensor is unknown,
                misshapen, without its other half or not finite after scaling; it is named.
            Unsupported: the adapter needs an unsupported feature, which the message names.
        """
        folder = expand_home(path, "lora")
        if not folder.is_dir():
            raise NotFound(f"path: folder {path} does not exist")
        config = read_lora_config(folder, has_vectors=self.has_vectors, has_experts=self.has_experts)
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
        places = self._places(1)
        copies = _OuterCopies.find(files, config, folder)
        tensors = self._tensors(files, frozenset(files.names - copies.names), folder)
        experts = self._experts(files, config, tensors, folder) if self.has_experts else {}
        known = {get_module(name) for place in places for leaf in place.leaves for name, _ in leaf.tensors}
        refuse_others(sorted(tensors.keys() - known), self.model.config, folder)
        trained = [each.trained for each in tensors.values() if each.has_matrices]
        _refuse_incomplete(config.targets, known, trained, folder)
        pairs = {module: self._pair(module, each, config, folder) for module, each in tensors.items()}
        wide = self._places(self.num_parts)
        without = (leaf for place in places if not place.vector_shapes() for leaf in place.leaves)
        for module in (get_module(name) for leaf in without for name, _ in leaf.tensors):
            if module in pairs and pairs[module].vectors:
                problem = "DoRA and biases of embeddings, experts and routers are not supported"
                raise Unsupported(f"{folder}: {module}: {problem}: {REMEDY}")
        with ExitStack() as opened:
            base = None
            if copies.names or config.saved or any(not pair.vectors.keys() <= {"added"} for pair in pairs.values()):
                base = opened.enter_context(_open_base(self.checkpoint, self.model.config, folder))
            replaced = {} if base is None else copies.read(base, self, pairs)
            source = _AdapterTensors(files, pairs, self.max_rank, self.model.dtype, base, replaced, experts)
            matrices = {each.path: self._matrices(each, to, source) for each, to in zip(places, wide, strict=True)}
            vectors = {}
            if self.has_vectors:
                vectors = {each.path: self._vectors(each, to, source) for each, to in zip(places, wide, strict=True)}
        return HostAdapter(matrices, vectors)

    def _places(self, num_parts: int) -> list[AdaptedPlace]:
        config = pad_for_sharding(self.model.config, num_parts)
        has = {"has_output": self.has_output, "has_input": self.has_input, "has_experts": self.has_experts}
        return list(adapted_places(config, self.layer_mode, **has))

    def _tensors(self, files: TensorFiles, stored: Set[str], folder: Path) -> dict[str, _Tensors]:
        """Return the tensors of each module, by its name in the model's checkpoints."""
        family = find_family(self.model.config.architecture)
        prefix, found = family.name_prefix(()), dict[str, _Tensors]()
        ((embedding, _),) = model_leaves(self.model.config).outer[0].tensors
        for name in sorted(stored):
            parts = _NAME.fullmatch(name)
            vector = _VECTOR.fullmatch(name)
            if parts is None and vector is not None and not self.has_vectors:
                raise Unsupported(f"{folder}: tensor {name}: DoRA and biases are not supported {WITHOUT_VECTORS}")
            parts = parts or vector
            if parts is None and _OF_EMBEDDING.search(name):
                raise Unsupported(
                    f"{folder}: tensor {name}: this form of embeddings and lm_head is not supported: {REMEDY}"
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
            known = family.layers_prefix.rstrip("."), get_module(embedding).removeprefix(prefix)
            module = f"{prefix}{'.'.join(inner)}" if inner and inner[0] in known else trained
            names = found.setdefault(module, _Tensors(trained, {})).names
            kind = (
                parts["which"]
                if vector is None
                else next(kind for kind in ("magnitude", "added", "bias") if vector[kind] is not None)
            )
            if kind in names:
                raise InvalidArgument("lora", f"{folder}: tensor {name} is present twice")
            names[kind] = name
        if not found:
            raise InvalidArgument("lora", f"{folder}: {WEIGHTS_FILE} has no tensors: save the adapter again")
        return found

    def _experts(
        self, files: TensorFiles, config: LoraConfig, tensors: dict[str, _Tensors], folder: Path
    ) -> dict[str, _ExpertPair]:
        """Take the tensors of experts from all tensors; return them by the layer's name and the name of a matrix.

        Those of routers get the names that routers have in checkpoints.
        """
        found = dict[str, _ExpertPair]()
        for leaves in (place.leaves for place in self._places(1) if is_of_experts(place.leaves[0])):
            for leaf in leaves:
                layer, own = _get_layer(leaf.tensors[0][0]), leaf.path[-2]
                for module in [module for module in tensors if _get_layer(module) == layer]:
                    words = get_words(module.replace(".base_layer", ""))
                    if own == "router" and words[-1] in _ROUTERS:
                        tensors[get_module(leaf.tensors[0][0])] = tensors.pop(module)
                    elif own != "router" and words[-1] == "experts":
                        pair = self._pair(module, tensors[module], config, folder)
                        if (each := _ExpertPair.find(files, pair, leaf, config)) is None:
                            continue
                        if found.setdefault(f"{layer}{own}", each) != each:
                            raise InvalidArgument("lora", f"{folder}: {module}: two adapters of experts' {own}")
        for module in [module for module in tensors if get_words(module.replace(".base_layer", ""))[-1] == "experts"]:
            pair = self._pair(module, tensors.pop(module), config, folder)
            if not any(each.pair == pair for each in found.values()):
                problem = f"{module} has A of {list(files.shape(pair.a))} and B of {list(files.shape(pair.b))}"
                raise InvalidArgument("lora", f"{folder}: {problem}, which are of no matrix of the model's experts")
        return found

    def _pair(self, module: str, tensors: _Tensors, config: LoraConfig, folder: Path) -> _Pair:
        vectors = {kind: name for kind, name in tensors.names.items() if kind not in ("A", "B")}
        if not tensors.has_matrices:
            return _Pair("", "", 0, 0.0, vectors)
        for kind, name, key, is_set in (
            ("magnitude", "lora_magnitude_vector", "use_dora", config.is_dora),
            ("added", "lora_B.bias", "lora_bias", config.has_bias),
        ):
            if (kind in vectors) != is_set:
                problem = f"has {'no' if is_set else 'a'} {name}, but {key} is {is_set}"
                raise InvalidArgument("lora", f"{folder}: {module} {problem}")
        rank = config.get_rank(tensors.trained)
        if rank > self.max_rank:
            raise InvalidArgument("lora", f"{folder}: {module} has rank {rank}; max_lora_rank is {self.max_rank}")
        for which in "AB":
            if which not in tensors.names:
                raise InvalidArgument("lora", f"{folder}: {module} has no lora_{which}.weight")
        return _Pair(tensors.names["A"], tensors.names["B"], rank, config.get_scale(tensors.trained, rank), vectors)

    def _matrices(
        self, place: AdaptedPlace, wide: AdaptedPlace, source: _AdapterTensors
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
        """Return the matrices of a place of the published model, in the layout of the padded model."""
        each_a, each_b = [], list[tuple[np.ndarray, ...]]()
        for leaf in place.leaves:
            a, b = source.read_experts(leaf) if place.num_experts else source.read(leaf)
            each_a.append(np.pad(a, ((0, 0), (0, wide.leaves[0].shape[0] - a.shape[1]))) if place.is_input else a)
            each_b.append(wide.split(self._padded(b, leaf)))
        if not place.is_stacked:
            return each_a[0], each_b[0]
        return np.stack(each_a), tuple(np.stack(parts) for parts in zip(*each_b, strict=True))

    def _vectors(self, place: AdaptedPlace, wide: AdaptedPlace, source: _AdapterTensors) -> tuple[np.ndarray, ...]:
        """Return the vectors of a place, in the layout of the padded model."""
        found = []
        if not wide.vector_shapes():
            return ()
        for leaf in place.leaves:
            found.append(wide.split(self._padded(source.read_vectors(leaf), leaf)))
        return tuple(np.stack(parts) for parts in zip(*found, strict=True)) if place.is_stacked else found[0]

    def _padded(self, rows: np.ndarray, leaf: Leaf) -> np.ndarray:
        """Return rows `[rank, *out]` of a published leaf with the outputs of the padded one."""
        split = padded_axis(leaf, self.num_parts)
        if split is None or split.axis == 0:  # inputs are never padded
            return rows
        if split.name == "vocab":
            return np.pad(rows, ((0, 0), (0, split.wide_size - rows.shape[1])))
        return split.padded(rows, 0, split.wide_size)


@dataclass(frozen=True, slots=True)
class _ExpertPair:
    """The tensors A and B of all experts of a layer.

    Attributes:
        is_exchanged: A is that of the outputs, and B that of the inputs.
    """

    pair: _Pair
    is_exchanged: bool

    @classmethod
    def find(cls, files: TensorFiles, pair: _Pair, leaf: Leaf, config: LoraConfig) -> _ExpertPair | None:
        """Return the pair if it has the sizes of a leaf, or of gates and ups together; otherwise None.

        If both sizes are equal, the release of PEFT decides, except for parameters `[experts, in, out]` of gpt-oss.
        """
        num_experts, inputs, outputs = leaf.shape
        of_a, of_b = (files.shape(name) for name in (pair.a, pair.b))
        if len(of_a) != 2 or len(of_b) != 2 or of_a[0] != num_experts * pair.rank or of_b[1] != of_a[0]:
            return None
        sizes, own = (of_a[1], of_b[0]), (inputs, outputs * (1 if leaf.path[-2] == "down" else 2))
        is_square = own[0] == own[1] and leaf.tensor_axes[:2] != (0, 1) and config.is_early
        return cls(pair, sizes != own or is_square) if sizes in (own, own[::-1]) else None


_LAYER_NUMBER = re.compile(r".*?\.(\d+)\.")


def _get_layer(name: str) -> str:
    """Return the beginning of a name with the number of a layer."""
    found = _LAYER_NUMBER.match(name)
    return "" if found is None else found[0]


_MAX_CHUNK = 1 << 24
"""Numbers of a base matrix that are in memory at one time: 64 MiB of float32."""


@dataclass(frozen=True, slots=True)
class _BaseTensors:
    """The weights and biases of the model's checkpoint, by the names of a checkpoint without prefix.

    Attributes:
        names: of the tensors in the checkpoint.
        is_quantized: a weight is decoded completely, whatever part is read.
    """

    source: TensorSource
    names: Mapping[str, str]
    is_quantized: bool
    folder: Path

    def get_bias(self, module: str, num_out: int) -> np.ndarray:
        """Read the bias of a module, float32 `[out]`."""
        name = self.names.get(f"{module}.bias")
        if name is None:
            problem = f"{self.folder}: {module} has a bias, but the model's has none: merge the adapter into the model"
            raise Unsupported(problem)
        return read_weight(self.source, name, (num_out,)).astype(np.float32)

    def find_changes(self, files: TensorFiles, name: str, word: str, reader: AdapterReader) -> _ReplacedRows:
        """Return the rows in which an adapter's copy of an embedding or output matrix differs from the model's.

        PEFT saves copies if the vocabulary was resized, whether or not they were trained. Numbers are compared in the
        model's type.

        Raises:
            Unsupported: the shapes differ, or more rows than the slots have ranks.
        """
        model, (own, shape) = reader.model, self._get_outer(word, reader.model.config)
        what = f"{self.folder}: tensor {name} replaces {word} of the model"
        remedy = f"which is not supported: {REMEDY}"
        if files.shape(name) != shape:
            raise Unsupported(f"{what}, whose shape is {list(shape)} instead of {list(files.shape(name))}, {remedy}")
        step = shape[0] if self.is_quantized else max(1, _MAX_CHUNK // shape[1])
        ids, differences = list[int](), [np.zeros((0, shape[1]), np.float32)]
        for begin in range(0, shape[0], step):
            index = (slice(begin, min(begin + step, shape[0])),)
            parts = read_weight(files, name, shape, index), read_weight(self.source, own, shape, index)
            new, old = (part.astype(model.dtype).astype(np.float32) for part in parts)
            (changed,) = np.nonzero((new != old).any(axis=1))
            ids.extend((begin + changed).tolist())
            if len(ids) > reader.max_rank:
                limit = f"in more rows than max_lora_rank ({reader.max_rank})"
                raise Unsupported(f"{what} with other numbers {limit}, {remedy}")
            differences.append(new[changed] - old[changed])
        return _ReplacedRows(name, tuple(ids), np.concatenate(differences))

    def read_rows(
        self, files: TensorFiles, name: str, word: str, ids: tuple[int, ...], reader: AdapterReader
    ) -> _ReplacedRows:
        """Return the rows that an adapter replaces by those of a tensor, in the order of the ids.

        Raises:
            InvalidArgument: they are more than the slots have ranks, an id is none of the model, or the shape differs.
        """
        own, (size, width) = self._get_outer(word, reader.model.config)
        problem, stored = "", files.shape(name)
        if stored != (len(ids), width):
            problem = f"has shape {list(stored)}; the model and trainable_token_indices require {[len(ids), width]}"
        elif len(ids) > reader.max_rank:
            problem = f"replaces {len(ids)} rows; max_lora_rank is {reader.max_rank}"
        elif max(ids, default=0) >= size:
            problem = f"replaces the row of token {max(ids)}; the model has {size}"
        if problem:
            raise InvalidArgument("lora", f"{self.folder}: tensor {name} {problem}")
        new = read_weight(files, name, stored).astype(np.float32)
        if self.is_quantized:
            old = read_weight(self.source, own, (size, width))[list(ids)]
        else:
            of_each = [read_weight(self.source, own, (size, width), (slice(each, each + 1),)) for each in ids]
            old = np.concatenate(of_each) if ids else new
        return _ReplacedRows(name, ids, new - old.astype(reader.model.dtype).astype(np.float32))

    def _get_outer(self, word: str, config: ModelConfig) -> tuple[str, tuple[int, int]]:
        """Return the name and the shape of the model's embedding or output matrix."""
        is_output = word in OUTPUT_MODULES and not config.tie_word_embeddings
        path = ("lm_head" if is_output else "embed", "embedding")
        leaf = next(leaf for leaf in model_leaves(config).outer if leaf.path == path)
        ((own, (size, width)),) = leaf.tensors
        return self.names[own], (size, width)

    def measure(self, module: str, shape: tuple[int, ...], in_axis: int, delta: tuple[np.ndarray, ...]) -> np.ndarray:
        """Return the norm of each output's row of W + B A, float32 `[out]`, for B times the scale, and A."""
        b, a = delta
        num_out, width = len(b), a.shape[1]
        step = num_out if self.is_quantized else max(1, _MAX_CHUNK // width)
        norms = []
        for begin in range(0, num_out, step):
            rows = slice(begin, min(begin + step, num_out))
            index = (rows,) if in_axis == 1 else (slice(None), rows)
            weights = read_weight(self.source, self.names[f"{module}.weight"], shape, index).astype(np.float32)
            weights = (weights if in_axis == 1 else weights.T) + b[rows] @ a
            norms.append(np.sqrt(np.square(weights, dtype=np.float64).sum(1)).astype(np.float32))
        return np.concatenate(norms)


@dataclass(frozen=True, slots=True)
class _ReplacedRows:
    """Rows of the embedding or the output matrix that an adapter replaces.

    Attributes:
        name: of the tensor with the rows.
        differences: from the model's rows, float32 `[ids, width]`.
    """

    name: str
    ids: tuple[int, ...]
    differences: np.ndarray


@dataclass(frozen=True, slots=True)
class _OuterCopies:
    """An adapter's tensors that replace the embedding or the output matrix, or rows of them.

    Attributes:
        copies: names of whole matrices, each with the last word of the module's name.
        rows: names of rows.
    """

    files: TensorFiles
    config: LoraConfig
    folder: Path
    copies: Mapping[str, str]
    rows: Mapping[str, str]

    @classmethod
    def find(cls, files: TensorFiles, config: LoraConfig, folder: Path) -> _OuterCopies:
        """Find them by their names."""
        short = [name for name in sorted(files.names) if len(name) <= MAX_NAME_LEN]
        copies = {name: found["word"] for name in short if (found := _SAVED_MODULE.fullmatch(name)) is not None}
        rows = {name: found["word"] for name in short if (found := _REPLACED_ROWS.fullmatch(name)) is not None}
        return cls(files, config, folder, *({n: w for n, w in of.items() if w in _TIED} for of in (copies, rows)))

    @property
    def names(self) -> Set[str]:
        """Names of all these tensors."""
        return self.copies.keys() | self.rows.keys()

    def read(self, base: _BaseTensors, reader: AdapterReader, pairs: Mapping[str, _Pair]) -> dict[str, _ReplacedRows]:
        """Return the replaced rows, by module. A tied output matrix follows the embedding, as in PEFT.

        Raises:
            Unsupported: there are too many, the server has no slots for them, or the module also has an adapter.
            InvalidArgument: the rows are not those of the config.
        """
        model, found = reader.model.config, dict[str, _ReplacedRows]()
        ((embedding, _),) = model_leaves(model).outer[0].tensors
        modules = get_module(embedding), get_module(find_family(model.architecture).lm_head)
        missing = {get_words(module)[-1] for module in modules} & self.config.saved - set(self.copies.values())
        if missing:
            problem = (
                f"modules_to_save has {min(missing)!r}, but {WEIGHTS_FILE} has no copy of it: save the adapter again"
            )
            raise InvalidArgument("lora", f"{self.folder}: {problem}")
        for name, word in (*self.copies.items(), *self.rows.items()):
            if name in self.copies:
                changes, is_tied = base.find_changes(self.files, name, word, reader), word not in self.config.saved
            else:
                ids = self.config.get_ids(word)
                changes, is_tied = base.read_rows(self.files, name, word, ids, reader), True
            if not changes.ids:
                continue
            if not np.isfinite(changes.differences.astype(reader.model.dtype)).all():
                raise InvalidArgument("lora", f"{self.folder}: tensor {name} has non-finite numbers")
            is_output = word in OUTPUT_MODULES
            found[modules[is_output]] = changes
            if is_tied and not is_output and model.tie_word_embeddings:
                found.setdefault(modules[1], changes)
        for module, has_slots, why in zip(modules, (reader.has_input, reader.has_output), _NO_SLOTS, strict=True):
            if module in found and (not has_slots or module in pairs):
                what = f"{self.folder}: tensor {found[module].name} replaces rows of {module}"
                raise Unsupported(f"{what}: {why}" if not has_slots else f"{what}, which also has an adapter")
        return found


_TIED = OUTER_MODULES - {"wpe"}
_NO_SLOTS = _NOT_INPUT, _NOT_OUTPUT


@contextmanager
def _open_base(checkpoint: Path | None, config: ModelConfig, folder: Path) -> Iterator[_BaseTensors]:
    """Open the checkpoint of the model that an adapter with DoRA or trained biases is for.

    Raises:
        Unsupported: there is none.
    """
    if checkpoint is None:
        raise Unsupported(
            f"{folder}: DoRA, trained biases and saved embeddings need the model's weights, but load_format is dummy"
        )
    with open_tensors(checkpoint) as files:
        scheme = read_scheme(checkpoint)
        published, stored = model_leaves(config), model_leaves(config, files.names)
        before, leaves = (
            [leaf for of_place in (each.outer, *each.layers) for leaf in of_place] for each in (published, stored)
        )
        names = {
            name: found
            for leaf, own in zip(before, leaves, strict=True)
            for (name, _), (found, _) in zip(leaf.tensors, own.tensors, strict=True)
        }
        names.setdefault(find_family(config.architecture).lm_head, names[published.outer[0].tensors[0][0]])
        source = files if scheme is None else Dequantized(files, scheme, tuple(leaves))
        yield _BaseTensors(source, names, scheme is not None, folder)


@dataclass(frozen=True, slots=True)
class _AdapterTensors:
    """The tensors of one adapter, by module, and those of the model if the adapter needs them."""

    files: TensorFiles
    pairs: Mapping[str, _Pair]
    max_rank: int
    dtype: np.dtype
    base: _BaseTensors | None = None
    replaced: Mapping[str, _ReplacedRows] = field(default_factory=dict)
    experts: Mapping[str, _ExpertPair] = field(default_factory=dict)
    gains: dict[str, np.ndarray] = field(default_factory=dict)

    def read(self, leaf: Leaf) -> tuple[np.ndarray, np.ndarray]:
        """Return A `[parts * rank, in]` and B `[rank, *out]` of the published leaf."""
        a = np.zeros((len(leaf.tensors) * self.max_rank, leaf.shape[0]), self.dtype)
        b = np.zeros((self.max_rank, *leaf.shape[1:]), self.dtype)
        if not any(get_module(name) in self.pairs.keys() | self.replaced.keys() for name, _ in leaf.tensors):
            return a, b
        in_axis = leaf.tensor_axes[0]
        outputs = []
        for part, (name, stored) in enumerate(leaf.tensors):
            num_out = stored[1 - in_axis] if in_axis is not None else stored[0]
            rows = np.zeros((num_out, self.max_rank), np.float32)
            pair = self.pairs.get(get_module(name))
            if pair is not None and pair.rank:
                begin = part * self.max_rank
                a[begin : begin + pair.rank] = self._finite(pair.a, (pair.rank, leaf.shape[0]))
                gains = self._gains(leaf, name, stored, pair)
                rows[:, : pair.rank] = self._finite(pair.b, (num_out, pair.rank), pair.scale, gains)
            if (changes := self.replaced.get(get_module(name))) is not None:
                self._put_rows(changes, leaf, a, rows)
            outputs.append(rows if in_axis == 1 else rows.T)
        leaf.pack(outputs, b)
        return a, b

    def read_experts(self, leaf: Leaf) -> tuple[np.ndarray, np.ndarray]:
        """Return A `[experts * rank, in]` and B `[experts * rank, out]` of a published leaf of all experts."""
        num_experts, inputs, outputs = leaf.shape
        a = np.zeros((num_experts, self.max_rank, inputs), self.dtype)
        b = np.zeros((num_experts, self.max_rank, outputs), self.dtype)
        own = self.experts.get(f"{_get_layer(leaf.tensors[0][0])}{leaf.path[-2]}")
        if own is not None:
            self._put_experts(own, leaf, a, b)
        for expert, (name, _) in enumerate(leaf.tensors):
            pair = self.pairs.get(get_module(name))
            if pair is not None and pair.rank:
                a[expert, : pair.rank] = self._finite(pair.a, (pair.rank, inputs))
                b[expert, : pair.rank] = self._finite(pair.b, (outputs, pair.rank), pair.scale).T
        return a.reshape(-1, inputs), b.reshape(-1, outputs)

    def _put_experts(self, own: _ExpertPair, leaf: Leaf, a: np.ndarray, b: np.ndarray) -> None:
        """Write the tensors of all experts to A and B, `[experts, rank, ...]`."""
        (num_experts, *_), rank, part = leaf.shape, own.pair.rank, leaf.path[-2]
        scales = (own.pair.scale, 1.0) if own.is_exchanged else (1.0, own.pair.scale)
        first, second = (
            self._finite(name, self.files.shape(name), scale)
            for name, scale in zip((own.pair.a, own.pair.b), scales, strict=True)
        )
        first = first.reshape(num_experts, rank, -1)
        second = second.reshape(len(second), rank, num_experts).transpose(2, 1, 0)
        into, out = (second, first) if own.is_exchanged else (first, second)
        if part != "down" and out.shape[2] != leaf.shape[2]:
            is_up = part == "up"
            alternates = leaf.tensor_axes == (0, 1, 2) and leaf.tensors[0][1] != leaf.shape
            out = out[..., is_up::2] if alternates else np.split(out, 2, axis=2)[is_up]
        a[:, :rank], b[:, :rank] = into, out

    @staticmethod
    def _put_rows(changes: _ReplacedRows, leaf: Leaf, a: np.ndarray, rows: np.ndarray) -> None:
        """Write replaced rows as an adapter: to A of a leaf, and to the rows of B, `[out, rank]`."""
        ranks = np.arange(len(changes.ids))
        if leaf.path == INPUT_PATH:
            a[ranks, changes.ids], rows[:, ranks] = 1, changes.differences.T
        else:
            a[ranks], rows[changes.ids, ranks] = changes.differences, 1

    def read_vectors(self, leaf: Leaf) -> np.ndarray:
        """Return scales less 1 and shifts, float32 `[2, *out]`, of the published leaf."""
        vectors = np.zeros((2, *leaf.shape[1:]), np.float32)
        in_axis, outputs = leaf.tensor_axes[0], []
        for name, stored in leaf.tensors:
            num_out = stored[1 - in_axis] if in_axis is not None else stored[0]
            rows = np.zeros((num_out, 2), np.float32)
            pair = self.pairs.get(get_module(name))
            if pair is not None:
                gains = self._gains(leaf, name, stored, pair)
                rows[:, 0] = 0.0 if gains is None else gains[:, 0] - 1
                rows[:, 1] = self._shift(get_module(name), num_out, pair)
            outputs.append(rows if in_axis == 1 else rows.T)
        leaf.pack(outputs, vectors)
        return vectors

    def _gains(self, leaf: Leaf, name: str, stored: tuple[int, ...], pair: _Pair) -> np.ndarray | None:
        """Return the magnitudes divided by the norms, float32 `[out, 1]`; None without DoRA."""
        if "magnitude" not in pair.vectors:
            return None
        if name not in self.gains:
            in_axis = leaf.tensor_axes[0]
            assert self.base is not None
            assert in_axis is not None
            num_out, module = stored[1 - in_axis], get_module(name)
            a = self._finite(pair.a, (pair.rank, leaf.shape[0]), dtype=_FLOAT32)
            b = self._finite(pair.b, (num_out, pair.rank), pair.scale, dtype=_FLOAT32)
            with np.errstate(over="ignore", invalid="ignore"):
                norms = self.base.measure(module, stored, in_axis, (b, a))
            magnitudes = self._finite(pair.vectors["magnitude"], (num_out,), dtype=_FLOAT32)
            if not (norms.all() and np.isfinite(norms).all()):
                where = str(self.files.where(pair.b))
                problem = f"{module}: a row of the weight with the adapter is zero or not finite, so that DoRA cannot "
                raise InvalidArgument(where, problem + "normalize it")
            with np.errstate(over="ignore"):
                self.gains[name] = (magnitudes / norms)[:, None]
        return self.gains[name]

    def _shift(self, module: str, num_out: int, pair: _Pair) -> np.ndarray | float:
        """Return the values to add to a module's outputs, float32 `[out]`."""
        shift: np.ndarray | float = 0.0
        if "added" in pair.vectors:
            shift = self._finite(pair.vectors["added"], (num_out,), pair.scale, dtype=_FLOAT32)
        if "bias" in pair.vectors:
            assert self.base is not None
            trained = self._finite(pair.vectors["bias"], (num_out,), dtype=_FLOAT32)
            with np.errstate(over="ignore"):
                shift = shift + (trained - self.base.get_bias(module, num_out))
        if not np.isfinite(shift).all():
            where = str(self.files.where(next(iter(pair.vectors.values()))))
            raise InvalidArgument(where, f"{module}: its biases less those of the model are not finite in float32")
        return shift

    def _finite(
        self,
        name: str,
        shape: tuple[int, ...],
        scale: float = 1.0,
        gains: np.ndarray | None = None,
        dtype: np.dtype | None = None,
    ) -> np.ndarray:
        """Return a scaled tensor in a type, or the model's; it must be finite, or its values would reach every row."""
        dtype = self.dtype if dtype is None else dtype
        stored = self.files.shape(name)
        where = str(self.files.where(name))
        if stored != shape:
            raise InvalidArgument(
                where, f"tensor {name} has shape {list(stored)}; model and rank require {list(shape)}"
            )
        with np.errstate(over="ignore", invalid="ignore"):
            tensor = read_weight(self.files, name, shape).astype(np.float32) * np.float32(scale)
            tensor = (tensor if gains is None else tensor * gains).astype(dtype)
        if not np.isfinite(tensor).all():
            raise InvalidArgument(where, f"tensor {name} times {scale:g} has non-finite numbers in {dtype.name}")
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
