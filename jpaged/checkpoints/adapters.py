r"""Adapters (LoRA) in files, as PEFT writes them: adapter_config.json, and the matrices of adapter_model.safetensors.

    base_model.model.<module>.lora_A.weight    [rank, in]
    base_model.model.<module>.lora_B.weight    [out, rank]

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
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from jpaged.checkpoints.hub import expand_home, read_json
from jpaged.checkpoints.names import is_ignored, model_leaves
from jpaged.checkpoints.tensor_files import TensorFiles, read_weight
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.models.config import ModelConfig
from jpaged.models.json_fields import JsonFields
from jpaged.models.lora import AdaptedPlace, HostAdapter, adapted_places, is_of_experts
from jpaged.models.model import Model
from jpaged.models.param_specs import Leaf, get_module
from jpaged.models.registry import find_family
from jpaged.models.sharding import pad_for_sharding, padded_axis
from jpaged.models.stack import LayerMode

NumberT = TypeVar("NumberT", int, float)

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
                    f"{shown} and those before it may match a name in {num_ways} ways; the limit is {_MAX_WAYS}: use "
                    "fewer repeats, optional parts and alternatives",
                )
        return cls(tuple(compiled))

    def of(self, module: str, default: NumberT) -> NumberT:
        """Return the number of the first pattern that a module's name matches, or the default."""
        return next((number for pattern, number in self.compiled if pattern.match(module)), default)


def _num_ways(expression: str) -> int:
    """Return a bound of the ways to match a name, for an expression without escapes, classes or repeated groups."""
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
    return num_ways * alternatives.pop()


CONFIG_FILE = "adapter_config.json"
# Origin and training of the adapter. The model determines the layout of the tensors.
_WITHOUT_EFFECT = (
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"),
    *("lora_dropout", "fan_in_fan_out", "layers_pattern"),
    *("corda_config", "eva_config", "loftq_config", "lora_ga_config", "megatron_config", "megatron_core"),
    *("ensure_weight_tying", "qalora_group_size", "runtime_config"),
)
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
        targets: suffixes of module names, starting at a dot: all such modules were trained. Empty if unknown.
    """

    rank: int
    alpha: float
    ranks: Patterns[int]
    alphas: Patterns[float]
    is_root: bool
    targets: tuple[str, ...]

    def get_rank(self, module: str) -> int:
        """Return the rank of a module's adapter."""
        return self.ranks.of(module, self.rank)

    def get_scale(self, module: str, rank: int) -> float:
        """Return the factor of the product of a module's two matrices of this rank."""
        return self.alphas.of(module, self.alpha) / (math.sqrt(rank) if self.is_root else rank)


def read_lora_config(folder: Path) -> LoraConfig:
    """Read the config in an adapter's folder.

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
    fields.only("use_dora", False, why="DoRA is not supported")
    fields.only("use_qalora", False, why="QALoRA is not supported")
    fields.only("bias", "none", why="only none is supported")
    fields.only("lora_bias", False, why="adapters with biases are not supported")
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
    why = "it changes the weights of the model itself; save it as an ordinary adapter, as PEFT describes"
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
        targets,
    )


def _targets(fields: JsonFields) -> tuple[str, ...]:
    """Return the listed targets; empty for a regular expression, or if exclusions restrict the list."""
    is_list = isinstance(fields.value("target_modules"), list)
    is_part = fields.value("exclude_modules") or fields.value("layers_to_transform") not in (None, [])
    return fields.names("target_modules") if is_list and not is_part else ()


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
