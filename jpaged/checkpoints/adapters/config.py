r"""PEFT's adapter_config.json: the scaling of an adapter, and the unsupported settings.

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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from jpaged.checkpoints.hub import read_json
from jpaged.errors import InvalidArgument
from jpaged.models.json_fields import JsonFields

NumberT = TypeVar("NumberT", int, float)

MAX_NAME_LEN = 200
"""Maximum characters of a tensor's name; PEFT's have up to about 110."""

_WAYS_OF_REPEAT = 32
_MAX_WAYS = 1 << 24
"""Limit of the ways, at which the longest name takes 0.1 s.

Measured with `.*.*.*x`, and with `.?` 18 times, which has 2^24 ways with the prefix that PEFT adds.
"""

_MAX_SHOWN = 200
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
            shown = f"{pattern!r:.{_MAX_SHOWN}}"
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
