r"""The matrices that LoRA adapters may apply to, and the layout of an adapter next to each.

If a matrix `[in, *out]` is made of several checkpoint tensors, each of these is a part: queries, keys and values, or
gates and ups. An adapter keeps a separate pair per tensor, as trained, so that no zeros are multiplied.

    a       [parts * rank, in]
    b       for each part [rank, its columns], times the adapter's scale

DoRA and biases need two more numbers for each output, if the server has room for them:

    vectors for each part [2, its columns], float32: a scale of the base's product less 1, and a shift

`LoraConfig` is the config of an adapter. Its patterns of names are regular expressions. Python's engine tries every way
in which a name may match while it holds the interpreter lock: `(a+)+b` would stop the server. So the number of ways is
bounded before matching. A repeat counts as 32 ways, because repeats share the letters of a name, an optional part as 2,
and alternatives as their number. A repeated group multiplies ways beyond that, and is refused.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from jpaged.errors import InvalidArgument, Unsupported
from jpaged.models.config import ModelConfig
from jpaged.models.json_fields import JsonFields
from jpaged.models.model import LeafPath, placed_leaves
from jpaged.models.param_specs import Leaf, Linears, LogicalAxes, get_module, stacked_kernel
from jpaged.models.registry import find_family
from jpaged.models.stack import LayerMode

_OF_EXPERTS = frozenset({"experts", "router"})
NumberT = TypeVar("NumberT", int, float)


@dataclass(frozen=True, slots=True)
class AdaptedPlace:
    """A place in the tree whose matrix may have adapters.

    Attributes:
        path: from the root.
        leaves: the leaf there, or those of the layers that are stacked there.
        is_stacked: an axis of layers comes first.
        is_input: the matrix is the embedding of ids, which are its inputs.

    The matrices of experts `[experts, in, out]` are one place. Its ranks are those of expert after expert.
    """

    path: LeafPath
    leaves: Sequence[Leaf]
    is_stacked: bool
    is_input: bool = False

    @property
    def num_parts(self) -> int:
        """Parts of the matrix."""
        return 1 if self.num_experts else len(self.leaves[0].tensors)

    @property
    def num_experts(self) -> int:
        """Experts of the place; 0 for others."""
        return self.leaves[0].shape[0] if "experts" in self.path else 0

    @property
    def num_groups(self) -> int:
        """Groups of columns with a share of every part, such as the key/value heads of queries, keys and values."""
        leaf = self.leaves[0]
        if self.num_parts == 1:
            return 1
        return leaf.num_groups if leaf.heads is None else leaf.heads.num_kv_heads

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        """Return the shapes of one adapter's a, and of b for each part, without an axis of layers."""
        if self.num_experts:
            num_experts, inputs, outputs = self.leaves[0].shape
            return (num_experts * rank, inputs), ((num_experts * rank, outputs),)
        width, *out = self.leaves[0].shape
        heads, num_parts = self.leaves[0].heads, self.num_parts
        columns: tuple[int, ...] = (math.prod(out) // num_parts,) * num_parts
        if heads is not None and num_parts > 1:
            columns = heads.outputs
        elif self.num_groups > 1:
            columns = tuple(shape[0] for _, shape in self.leaves[0].tensors)
        return (self.num_parts * rank, width), tuple((rank, num) for num in columns)

    def vector_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of one adapter's vectors, without an axis of layers."""
        return () if self.is_input or not _OF_EXPERTS.isdisjoint(self.path) else self.shapes(2)[1]

    def axes(self) -> tuple[LogicalAxes, LogicalAxes]:
        """Return the axis names of a, and of b of each part, without an axis of layers."""
        if self.num_experts:
            experts, inputs, outputs = self.leaves[0].axes
            return (experts, inputs), (experts, outputs)
        width, *out = self.leaves[0].axes
        # gates and ups of one tensor: a device's part of both is no contiguous range of columns
        if self.num_parts == 1 and len(out) > 1:
            return (None, width), (None, None)
        return (None, width), (None, next((name for name in out if name is not None), None))

    def split(self, b: np.ndarray) -> tuple[np.ndarray, ...]:
        """Split `[rank, *out]`, packed as the matrix is, into parts."""
        if self.num_experts:
            return (b,)
        columns = [num // self.num_groups for _, num in self.shapes(len(b))[1]]
        of_groups = np.split(b.reshape(len(b), self.num_groups, -1), np.cumsum(columns)[:-1], axis=2)
        return tuple(np.ascontiguousarray(part).reshape(len(b), -1) for part in of_groups)


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """An adapter in host memory, as a model's programs take it: zeros for matrices that it does not change.

    Attributes:
        matrices: for each place a, and b of each part; with an axis of layers first if those are stacked.
        vectors: for each place those of each part; empty if the server has no room for them.
        digest: a hash of every place and its matrices, 32 bytes; computed at construction, on the loading thread.
    """

    matrices: Mapping[LeafPath, tuple[np.ndarray, tuple[np.ndarray, ...]]]
    vectors: Mapping[LeafPath, tuple[np.ndarray, ...]] = field(default_factory=dict)
    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        found = hashlib.sha256()
        for path, (a, b) in sorted(self.matrices.items(), key=lambda item: str(item[0])):
            for array in (a, *b, *self.vectors.get(path, ())):
                found.update(repr((path, array.shape, array.dtype.name)).encode())
                found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        object.__setattr__(self, "digest", found.digest())

    @property
    def num_bytes(self) -> int:
        """Bytes of all matrices."""
        vectors = sum(part.nbytes for parts in self.vectors.values() for part in parts)
        return vectors + sum(a.nbytes + sum(part.nbytes for part in b) for a, b in self.matrices.values())


def is_of_experts(leaf: Leaf) -> bool:
    """Return True if a leaf belongs to experts or their router."""
    return not _OF_EXPERTS.isdisjoint(leaf.path)


def adapted_places(
    config: ModelConfig,
    layer_mode: LayerMode,
    *,
    has_output: bool = False,
    has_input: bool = False,
    has_experts: bool = False,
) -> Iterator[AdaptedPlace]:
    """Yield every place that may have adapters, in the order of the tree.

    The output matrix and the embedding are described as kernels `[in, out]`. If the output matrix is tied to the
    embedding, its place is the embedding. The adapters of ids have their own place next to it.

    Args:
        has_output: with the output matrix.
        has_input: with the embedding of ids.
        has_experts: with experts and routers.
    """
    for path, leaves in placed_leaves(config, layer_mode):
        if path[0] == "layers" and path[-1] == "kernel" and (has_experts or not is_of_experts(leaves[0])):
            yield AdaptedPlace(path, leaves, layer_mode == "scan")
    if has_output:
        path = get_output_path(config)
        size, width = next(leaf.shape for own, (leaf, *_) in placed_leaves(config, "loop") if own == path)
        linears = Linears((get_module(find_family(config.architecture).lm_head),))
        yield AdaptedPlace(path, (stacked_kernel(path, linears, ("embed", "vocab"), (width, size)),), False)
    if has_input:
        (embedding,) = next(leaves for own, leaves in placed_leaves(config, "loop") if own == ("embed", "embedding"))
        linears = Linears((get_module(embedding.tensors[0][0]),))
        kernel = stacked_kernel(INPUT_PATH, linears, (None, "embed"), embedding.shape)
        yield AdaptedPlace(INPUT_PATH, (kernel,), False, is_input=True)


INPUT_PATH = ("embed", "adapters")
"""Path of the adapters of ids, next to the embedding."""


def get_output_path(config: ModelConfig) -> tuple[str, str]:
    """Return the path of the matrix of the logits."""
    return "embed" if config.tie_word_embeddings else "lm_head", "embedding"


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


# Origin and training of the adapter. The model determines the layout of the tensors.
_WITHOUT_EFFECT = (
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "revision", "task_type"),
    *("lora_dropout", "fan_in_fan_out", "layers_pattern"),
    *("corda_config", "eva_config", "loftq_config", "lora_ga_config", "megatron_config", "megatron_core"),
    *("ensure_weight_tying", "qalora_group_size", "runtime_config"),
)
WITHOUT_VECTORS = "without enable_dora: start the server with --enable-dora, or merge the adapter into the model"
NOT_EXPERTS = (
    "adapters of experts and routers are not supported without enable_expert_lora: start the server with "
    "--enable-expert-lora, or merge the adapter into the model"
)
REMEDY = "merge the adapter into the model, or train it without them"
_MAX_RANK = 1 << 16
_MAX_SHOWN = 5
OUTER_MODULES = frozenset({"lm_head", "embed_out", "embed_tokens", "embed_in", "wte", "wpe", "word_embeddings"})
OUTPUT_MODULES = frozenset({"lm_head", "embed_out"})


def get_words(module: str) -> list[str]:
    """Return the parts of a module's name."""
    return module.split(".")


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
        saved: last words of the names of modules of which the adapter has a trained copy.
        is_early: it may be from a release of PEFT before 0.19, which exchanges inputs and outputs of most experts.
        tokens: ids of replaced rows, by the last word of a module's name; those of the embedding may be under "".
    """

    rank: int
    alpha: float
    ranks: Patterns[int]
    alphas: Patterns[float]
    is_root: bool
    is_dora: bool
    has_bias: bool
    targets: tuple[str, ...]
    saved: frozenset[str] = frozenset()
    is_early: bool = False
    tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def get_ids(self, word: str) -> tuple[int, ...]:
        """Return the ids of the rows of the embedding or output matrix that the adapter replaces."""
        return self.tokens.get(word, () if word in OUTPUT_MODULES else self.tokens.get("", ()))

    def get_rank(self, module: str) -> int:
        """Return the rank of a module's adapter."""
        return self.ranks.of(module, self.rank)

    def get_scale(self, module: str, rank: int) -> float:
        """Return the factor of the product of a module's two matrices of this rank."""
        return self.alphas.of(module, self.alpha) / (math.sqrt(rank) if self.is_root else rank)


def parse_lora_config(fields: JsonFields, *, has_vectors: bool = False, has_experts: bool = False) -> LoraConfig:
    """Parse an adapter's config.

    Args:
        has_vectors: slots have room for DoRA and biases.
        has_experts: experts and routers have slots.

    Raises:
        InvalidArgument: it is malformed.
        Unsupported: it needs an unsupported feature, which the message names.
    """
    fields.only("peft_type", "LORA", why="only LORA is supported")
    extra = (True,) if has_vectors else ()
    fields.only("use_dora", False, *extra, why=f"DoRA is not supported {WITHOUT_VECTORS}")
    fields.only("use_qalora", False, why="QALoRA is not supported")
    biases = ("all", "lora_only") if has_vectors else ()
    fields.only("bias", "none", *biases, why=f"biases are not supported {WITHOUT_VECTORS}")
    fields.only("lora_bias", False, *extra, why=f"biases are not supported {WITHOUT_VECTORS}")
    is_dora, has_bias = fields.flag("use_dora", False), fields.flag("lora_bias", False)
    if is_dora and has_bias:
        raise fields.bad("lora_bias", "is True; it must be False if use_dora is True, as PEFT requires")
    parameters = fields.names("target_parameters")
    if parameters and not has_experts:
        raise Unsupported(f"{fields.name}: target_parameters has {parameters[0]!r}: {NOT_EXPERTS}")
    for key in ("layer_replication", "alora_invocation_tokens", "arrow_config"):
        fields.only(key, why="it is not supported")
    why = (
        "it changes the weights of the model itself: convert it to plain LoRA (PEFT: save_pretrained with "
        "path_initial_model_for_weight_conversion), or merge the adapter into the model"
    )
    fields.only("init_lora_weights", True, False, "gaussian", "eva", "orthogonal", "mica", why=why)
    fields.ignore(_WITHOUT_EFFECT)
    version = re.match(r"(\d+)\.(\d+)", fields.text("peft_version", "0.0"))
    is_early = version is None or (int(version[1]), int(version[2])) < (0, 19)
    rank = fields.integer("r", maximum=_MAX_RANK)
    alpha, is_root = fields.number("lora_alpha", is_signed=True), fields.flag("use_rslora", False)
    patterns = {
        key: JsonFields(fields.mapping(key), f"{fields.name} {key}") for key in ("rank_pattern", "alpha_pattern")
    }
    ranks = {key: patterns["rank_pattern"].integer(key, maximum=_MAX_RANK) for key in fields.mapping("rank_pattern")}
    alphas = {key: patterns["alpha_pattern"].number(key, is_signed=True) for key in fields.mapping("alpha_pattern")}
    targets, saved, tokens = _targets(fields), _saved(fields), _tokens(fields)
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
        saved,
        is_early,
        tokens,
    )


def _targets(fields: JsonFields) -> tuple[str, ...]:
    """Return the listed targets; empty for a regular expression, or if exclusions restrict the list."""
    is_list = isinstance(fields.value("target_modules"), list)
    restrictions = [fields.value(key) for key in ("exclude_modules", "layers_to_transform")]
    is_part = any(each not in (None, [], "") for each in restrictions)
    return fields.names("target_modules") if is_list and not is_part else ()


def _saved(fields: JsonFields) -> frozenset[str]:
    """Return the last words of the modules of which the adapter has a copy; they must be those around the layers."""
    names = fields.names("modules_to_save")
    for name in names:
        if get_words(name)[-1] not in OUTER_MODULES - {"wpe"}:
            raise Unsupported(
                f"{fields.name}: modules_to_save has {name!r}; copies are supported only of embed_tokens and lm_head: "
                "train without them, or merge the adapter into the model"
            )
    return frozenset(get_words(name)[-1] for name in names)


def _tokens(fields: JsonFields) -> dict[str, tuple[int, ...]]:
    key = "trainable_token_indices"
    value = fields.value(key)
    given = JsonFields(value if isinstance(value, Mapping) else {"": value}, f"{fields.name} {key}")
    found = {}
    for name in value if isinstance(value, Mapping) else ("",):
        found[get_words(name)[-1]] = ids = given.token_ids(name)
        if len(set(ids)) < len(ids):
            raise fields.bad(key, f"has an id twice: {', '.join(str(each) for each in ids[:_MAX_SHOWN])}, ...")
        if name and found.keys() - OUTER_MODULES:
            raise Unsupported(f"{fields.name}: {key} has {name!r}; it must have only embed_tokens and lm_head")
    return found
