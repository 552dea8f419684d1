r"""Adapters (LoRA) in files, as PEFT writes them: adapter_config.json, and the matrices of adapter_model.safetensors.

    base_model.model.<module>.lora_A.weight    [rank, in]
    base_model.model.<module>.lora_B.weight    [out, rank]

With room for vectors (`enable_dora`), also DoRA and biases:

    base_model.model.<module>.lora_magnitude_vector    [out]    m
    base_model.model.<module>.lora_B.bias              [out]    c: lora_bias
    base_model.model.<module>.base_layer.bias          [out]    b', in place of the base's b: bias is all or lora_only

The result is g (W x + s B A x) + s c + b', with g = m / |W + s B A|, the norm of each output's row. So B is stored
times s g, and the vectors are g - 1 and s c + b' - b. W and b are read from the model's checkpoint.

The leaf's `pack` converts B like a weight with `rank` inputs. So reordered heads and fused projections get the same
layout as the base matrix. Modules without an adapter get zeros. Modules that do not support adapters are refused, as
are unsupported settings.

`rank_pattern` and `alpha_pattern` are regular expressions of module names, each with a number. As in PEFT, the first
pattern counts that matches the end of a name, from a dot on: `(.*\.)?(pattern)$`.

Python's engine tries every way in which a name may match while it holds the interpreter lock: `(a+)+b` would stop the
server. So the number of ways is bounded before matching. A repeat counts as 32 ways, because repeats share the letters
of a name, an optional part as 2, and alternatives as their number. A repeated group multiplies ways beyond that, and is
refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from jpaged.checkpoints.hub import expand_home, read_json, read_scheme
from jpaged.checkpoints.names import is_ignored, model_leaves
from jpaged.checkpoints.quantized.leaf import Dequantized
from jpaged.checkpoints.tensor_files import TensorFiles, TensorSource, read_weight
from jpaged.checkpoints.weights import open_tensors
from jpaged.errors import InvalidArgument, NotFound, Unsupported
from jpaged.models.config import ModelConfig
from jpaged.models.json_fields import JsonFields
from jpaged.models.lora import AdaptedPlace, HostAdapter, adapted_places, is_of_experts
from jpaged.models.model import Model
from jpaged.models.param_specs import Leaf, get_module
from jpaged.models.registry import find_family
from jpaged.models.sharding import pad_for_sharding, padded_axis
from jpaged.models.stack import LayerMode

NumberT = TypeVar("NumberT", int, float)
_FLOAT32 = np.dtype(np.float32)

MAX_NAME_LEN = 200
"""Maximum characters of a tensor's name; PEFT's have up to about 110."""

_WAYS_OF_REPEAT = 32
_MAX_WAYS = 1 << 24
"""Limit of the ways, at which the longest name takes 0.1 s.

Measured with `.*.*.*x`, and with `.?` 18 times, which has 2^24 ways with the prefix that PEFT adds.
"""

_MAX_PATTERN_CHARS = 200
_LETTER = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_OTHER_GROUP = re.compile(r"\(\?[^:=!<P]")
_CHOICE = re.compile(r"\((?:\?[:=!<P])?|\)|\||(?:[*+?]|\{[\d,]*\})[?+]?")


@dataclass(frozen=True, slots=True)
class Patterns(Generic[NumberT]):
    """Compiled regular expressions of module names, each with a number."""

    compiled: tuple[tuple[re.Pattern[str], NumberT], ...]

    @classmethod
    def checked(cls, numbers: Mapping[str, NumberT], field: str) -> Patterns[NumberT]:
        """Compile the patterns of a field.

        Raises:
            InvalidArgument: a pattern is no regular expression, or they may try a name in too many ways; it is named.
        """
        compiled, num_ways = [], 0
        for pattern, number in numbers.items():
            expression = rf"(.*\.)?({pattern})$"
            shown = f"{pattern!r:.{_MAX_PATTERN_CHARS}}"
            try:
                compiled.append((re.compile(expression), number))
            except (re.error, OverflowError, RecursionError) as error:
                problem = f"{shown} is not a regular expression in PEFT's form, (.*\\.)?(...)$: {error}"
                raise InvalidArgument(field, problem) from error
            plain = _LETTER.sub("x", expression)
            for kind, what in ((_REPEATED_GROUP, "repeats a group"), (_OTHER_GROUP, "has a special group")):
                if kind.search(plain):
                    raise InvalidArgument(
                        field, f"{shown} {what}, which may take unlimited time: rewrite it without that"
                    )
            num_ways += _num_ways(plain)
            if num_ways > _MAX_WAYS:
                raise InvalidArgument(
                    field,
                    f"{shown} and those before it may match a name in at least {num_ways} ways; the limit is "
                    f"{_MAX_WAYS}: use fewer repeats, optional parts and alternatives",
                )
        return cls(tuple(compiled))

    def of(self, module: str, default: NumberT) -> NumberT:
        """Return the number of the first pattern that a module's name matches, or the default."""
        return next((number for pattern, number in self.compiled if pattern.match(module)), default)


def _num_ways(expression: str) -> int:
    """Return a bound of the ways to match a name, for an expression without escapes, classes or repeated groups.

    Above the limit, it is that of a beginning of the expression.
    """
    num_ways, alternatives = 1, [1]
    for choice in _CHOICE.findall(expression):
        if choice.startswith("("):
            alternatives.append(1)
        elif choice == ")":
            num_ways *= alternatives.pop()
        elif choice == "|":
            alternatives[-1] += 1
        else:
            num_ways *= 2 if choice.startswith("?") else _WAYS_OF_REPEAT
        if num_ways > _MAX_WAYS:
            return num_ways
    return num_ways * alternatives.pop()


CONFIG_FILE = "adapter_config.json"
# Origin and training of the adapter. The model determines the layout of the tensors.
_WITHOUT_EFFECT = (
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"),
    *("lora_dropout", "fan_in_fan_out", "layers_pattern"),
    *("corda_config", "eva_config", "loftq_config", "lora_ga_config", "megatron_config", "megatron_core"),
    *("ensure_weight_tying", "qalora_group_size", "runtime_config"),
)
_WITHOUT_VECTORS = "without enable_dora: start the server with --enable-dora, or merge the adapter into the model"
_MAX_RANK = 1 << 16
MAX_CONFIG_BYTES = 1 << 20
"""Limit of adapter_config.json: a running server parses it, which holds Python's lock for about 10 ms."""


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Scaling of an adapter, and the modules that it was trained for, named as in the trained model.

    Attributes:
        ranks: ranks of matching modules; others have `rank`.
        alphas: alphas of matching modules; others have `alpha`.
        is_root: the scale is divided by the square root of the rank instead of the rank (rsLoRA).
        is_dora: modules have magnitudes.
        has_bias: B of each module has a bias.
        targets: suffixes of module names, starting at a dot: all such modules were trained. Empty if unknown.
    """

    rank: int
    alpha: float
    ranks: Patterns[int]
    alphas: Patterns[float]
    is_root: bool
    is_dora: bool
    has_bias: bool
    targets: tuple[str, ...]

    def get_rank(self, module: str) -> int:
        """Return the rank of a module's adapter."""
        return self.ranks.of(module, self.rank)

    def get_scale(self, module: str, rank: int) -> float:
        """Return the factor of the product of a module's two matrices of this rank."""
        return self.alphas.of(module, self.alpha) / (math.sqrt(rank) if self.is_root else rank)


def read_lora_config(folder: Path, *, has_vectors: bool = False) -> LoraConfig:
    """Read the config in an adapter's folder.

    Args:
        has_vectors: slots have room for DoRA and biases.

    Raises:
        InvalidArgument: it is missing or malformed.
        Unsupported: it needs an unsupported feature, which the message names.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise InvalidArgument(
            "lora", f"folder {folder} has no {CONFIG_FILE}; it must be in the layout that PEFT writes"
        )
    fields = JsonFields(read_json(path, MAX_CONFIG_BYTES), str(path))
    fields.only("peft_type", "LORA", why="only LORA is supported")
    extra = (True,) if has_vectors else ()
    fields.only("use_dora", False, *extra, why=f"DoRA is not supported {_WITHOUT_VECTORS}")
    fields.only("use_qalora", False, why="QALoRA is not supported")
    biases = ("all", "lora_only") if has_vectors else ()
    fields.only("bias", "none", *biases, why=f"biases are not supported {_WITHOUT_VECTORS}")
    fields.only("lora_bias", False, *extra, why=f"biases are not supported {_WITHOUT_VECTORS}")
    is_dora, has_bias = fields.flag("use_dora", False), fields.flag("lora_bias", False)
    if is_dora and has_bias:
        raise fields.bad("lora_bias", "is True; it must be False if use_dora is True, as PEFT requires")
    for key in ("modules_to_save", "target_parameters", "trainable_token_indices"):
        fields.only(
            key,
            *([], {}),
            why=(
                "adapters are supported only for linear modules of layers, not for embeddings, lm_head or other "
                "parameters: train without them, or merge the adapter into the model"
            ),
        )
    for key in ("layer_replication", "alora_invocation_tokens", "arrow_config"):
        fields.only(key, why="it is not supported")
    why = (
        "it changes the weights of the model itself: convert it to plain LoRA (PEFT: save_pretrained with "
        "path_initial_model_for_weight_conversion), or merge the adapter into the model"
    )
    fields.only("init_lora_weights", True, False, "gaussian", "eva", "orthogonal", "mica", why=why)
    fields.ignore(_WITHOUT_EFFECT)
    rank = fields.integer("r", maximum=_MAX_RANK)
    alpha, is_root = fields.number("lora_alpha", is_signed=True), fields.flag("use_rslora", False)
    patterns = {key: JsonFields(fields.mapping(key), f"{path} {key}") for key in ("rank_pattern", "alpha_pattern")}
    ranks = {key: patterns["rank_pattern"].integer(key, maximum=_MAX_RANK) for key in fields.mapping("rank_pattern")}
    alphas = {key: patterns["alpha_pattern"].number(key, is_signed=True) for key in fields.mapping("alpha_pattern")}
    targets = _targets(fields)
    fields.finish()
    return LoraConfig(
        rank,
        alpha,
        Patterns.checked(ranks, patterns["rank_pattern"].name),
        Patterns.checked(alphas, patterns["alpha_pattern"].name),
        is_root,
        is_dora,
        has_bias,
        targets,
    )


def _targets(fields: JsonFields) -> tuple[str, ...]:
    """Return the listed targets; empty for a regular expression, or if exclusions restrict the list."""
    is_list = isinstance(fields.value("target_modules"), list)
    restrictions = [fields.value(key) for key in ("exclude_modules", "layers_to_transform")]
    is_part = any(each not in (None, [], "") for each in restrictions)
    return fields.names("target_modules") if is_list and not is_part else ()


_MAX_SHOWN = 5
_OUTER_MODULES = frozenset({"lm_head", "embed_out", "embed_tokens", "embed_in", "wte", "wpe", "word_embeddings"})
_NOT_OUTER = (
    "adapters of embeddings and lm_head are not supported, except those of lm_head with enable_lm_head_lora: start the "
    "server with --enable-lm-head-lora, or merge the adapter into the model"
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
_VECTOR = re.compile(
    r"base_model\.model\.(?P<module>.+?)\."
    r"((?P<magnitude>lora_magnitude_vector(\.default)?(\.weight)?)|(?P<added>lora_B(\.default)?\.bias)"
    r"|(?P<bias>(base_layer\.)?bias))"
)
_OF_EMBEDDING = re.compile(r"\.lora_embedding_[AB](\.|$)|(^|\.)(embed_\w+|wte|wpe|lm_head|embed_out)\.")
_SAVED_MODULE = re.compile(
    r"base_model\.model\.([\w.]+?\.)??(?P<word>\w+)(\.base_layer|\.modules_to_save(\.default)?)?\.weight"
)
_OUTPUT_MODULES = frozenset({"lm_head", "embed_out"})
_OUTER = frozenset({"model", "language_model", "transformer", "gpt_neox", "decoder"})
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
        checkpoint: of the model; None if its weights are random, which supports no DoRA and no trained biases.
    """

    model: Model
    layer_mode: LayerMode
    num_parts: int
    max_rank: int
    has_vectors: bool = False
    has_output: bool = False
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
        config = read_lora_config(folder, has_vectors=self.has_vectors)
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
        saved = {name: word for name in files.names if (word := _get_saved_module(name)) is not None}
        tensors = self._tensors(files, frozenset(files.names - saved.keys()), folder)
        known = {get_module(name) for place in places for leaf in place.leaves for name, _ in leaf.tensors}
        refuse_others(sorted(tensors.keys() - known), self.model.config, folder)
        trained = [each.trained for each in tensors.values() if each.has_matrices]
        _refuse_incomplete(config.targets, known, trained, folder)
        pairs = {module: self._pair(module, each, config, folder) for module, each in tensors.items()}
        wide = self._places(self.num_parts)
        with ExitStack() as opened:
            base = None
            if saved or any(not pair.vectors.keys() <= {"added"} for pair in pairs.values()):
                base = opened.enter_context(_open_base(self.checkpoint, self.model.config, folder))
            for name, word in sorted(saved.items()):
                assert base is not None
                base.require_same(files, name, word, self.model)
            source = _AdapterTensors(files, pairs, self.max_rank, self.model.dtype, base)
            matrices = {each.path: self._matrices(each, to, source) for each, to in zip(places, wide, strict=True)}
            vectors = {}
            if self.has_vectors:
                vectors = {each.path: self._vectors(each, to, source) for each, to in zip(places, wide, strict=True)}
        return HostAdapter(matrices, vectors)

    def _places(self, num_parts: int) -> list[AdaptedPlace]:
        config = pad_for_sharding(self.model.config, num_parts)
        return list(adapted_places(config, self.layer_mode, has_output=self.has_output))

    def _tensors(self, files: TensorFiles, stored: Set[str], folder: Path) -> dict[str, _Tensors]:
        """Return the tensors of each module, by its name in the model's checkpoints."""
        family = find_family(self.model.config.architecture)
        prefix, found = family.name_prefix(()), dict[str, _Tensors]()
        for name in sorted(stored):
            parts = _NAME.fullmatch(name)
            vector = _VECTOR.fullmatch(name)
            if parts is None and vector is not None and not self.has_vectors:
                raise Unsupported(f"{folder}: tensor {name}: DoRA and biases are not supported {_WITHOUT_VECTORS}")
            parts = parts or vector
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
            a, b = source.read(leaf)
            each_a.append(a)
            each_b.append(wide.split(self._padded(b, leaf)))
        if not place.is_stacked:
            return each_a[0], each_b[0]
        return np.stack(each_a), tuple(np.stack(parts) for parts in zip(*each_b, strict=True))

    def _vectors(self, place: AdaptedPlace, wide: AdaptedPlace, source: _AdapterTensors) -> tuple[np.ndarray, ...]:
        """Return the vectors of a place, in the layout of the padded model."""
        found = []
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

    def require_same(self, files: TensorFiles, name: str, word: str, model: Model) -> None:
        """Raise an error unless an adapter's copy of an embedding or output matrix equals the model's.

        PEFT saves copies if the vocabulary was resized, whether or not they were trained. Numbers are compared in the
        model's type.

        Raises:
            Unsupported: they differ.
        """
        config = model.config
        is_output = word in _OUTPUT_MODULES and not config.tie_word_embeddings
        path = ("lm_head" if is_output else "embed", "embedding")
        leaf = next(leaf for leaf in model_leaves(config).outer if leaf.path == path)
        ((own, shape),) = leaf.tensors
        what = f"{self.folder}: tensor {name} replaces {word} of the model"
        remedy = "which is not supported: merge the adapter into the model, or train it without them"
        if files.shape(name) != shape:
            raise Unsupported(f"{what}, whose shape is {list(shape)} instead of {list(files.shape(name))}, {remedy}")
        step = shape[0] if self.is_quantized else max(1, _MAX_CHUNK // shape[1])
        for begin in range(0, shape[0], step):
            index = (slice(begin, min(begin + step, shape[0])),)
            parts = read_weight(files, name, shape, index), read_weight(self.source, self.names[own], shape, index)
            first, second = (part.astype(model.dtype) for part in parts)
            if not np.array_equal(first, second):
                raise Unsupported(f"{what} with other numbers, {remedy}")

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


def _get_saved_module(name: str) -> str | None:
    """Return the last word of the embedding or output matrix that a tensor is a copy of; None for other tensors."""
    found = _SAVED_MODULE.fullmatch(name) if len(name) <= MAX_NAME_LEN else None
    return found["word"] if found is not None and found["word"] in _OUTER_MODULES - {"wpe"} else None


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
    gains: dict[str, np.ndarray] = field(default_factory=dict)

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
            if pair is not None and pair.rank:
                begin = part * self.max_rank
                a[begin : begin + pair.rank] = self._finite(pair.a, (pair.rank, leaf.shape[0]))
                gains = self._gains(leaf, name, stored, pair)
                rows[:, : pair.rank] = self._finite(pair.b, (num_out, pair.rank), pair.scale, gains)
            outputs.append(rows if in_axis == 1 else rows.T)
        leaf.pack(outputs, b)
        return a, b

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
