"""Switches in which families of models differ from Llama, and the config and tensors that follow from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jpaged.errors import Unsupported
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.mixture_kind import Routing
from jpaged.models.config import MAX_LAYERS, MAX_WIDTH, Mixture
from jpaged.models.decoder import DecoderConfig, Names, decoder_family
from jpaged.models.decoder.config_fields import (
    FULL,
    MAX_EXPERTS,
    SLIDING,
    TRAINING,
    name_of_activation,
    read_activation,
    read_heads,
    read_sizes,
    read_window,
)
from jpaged.models.family import Family
from jpaged.models.json_fields import JsonFields
from jpaged.models.layer_kinds import LayerKind
from jpaged.models.rope_config import RopeConfig


@dataclass(frozen=True, slots=True)
class Key:
    """A key of config.json that sets a field of `DecoderConfig`.

    Attributes:
        default: for a missing key; its type is the value's. A text is the name of an activation.
        choices: values of the field if the key is false, and if it is true; None is the key's own value.
        is_divisor: the field is one divided by the key's value.
        synonym: another name, read if the first is missing.
    """

    name: str
    default: bool | float | str
    choices: tuple[Any, Any] | None = None
    is_divisor: bool = False
    synonym: str = ""

    def read(self, fields: JsonFields) -> Any:
        """Return the field's value."""
        name = self.synonym if self.synonym and not fields.has(self.name) else self.name
        if isinstance(self.default, str):
            return read_activation(fields, name, self.default)
        if isinstance(self.default, bool):
            value = fields.flag(name, self.default)
            return value if self.choices is None else self.choices[value]
        number = fields.number(name, self.default)
        return 1 / number if self.is_divisor else number

    def write(self, value: Any) -> object:
        """Return the key's value; the inverse of `read`."""
        if isinstance(self.default, str):
            return name_of_activation(value)
        if self.choices is not None:
            return bool(value == self.choices[True])
        return 1 / value if self.is_divisor else value


_PATTERN = ("sliding_window_pattern", "_sliding_window_pattern")
"""Names of the period of layers without a window, which counts only without `layer_types`."""


@dataclass(frozen=True, slots=True)
class Layers:
    """Windows and ropes of layers.

    Attributes:
        windows: `none`; `all`, a window in all layers, if there is one; or `types`, as `layer_types` lists, else in all
            but each `period`th layer.
        window: default of `sliding_window`.
        ropes: indexes of the ropes of layers without a window, and of those with one; None is no rotation.
        has_list: `no_rope_layers` lists layers with rotation, else each `no_rope_layer_interval`th has none.
    """

    windows: Literal["none", "all", "types"] = "none"
    window: int | None = None
    period: int = 4
    ropes: tuple[int | None, int | None] = (0, 0)
    has_list: bool = False

    def read(self, fields: JsonFields, num_layers: int, scale: float) -> tuple[LayerKind, ...]:
        """Return the kind of each layer."""
        full = AttentionKind(scale)
        if self.has_list:
            return tuple(LayerKind(full, 0 if rotates else None) for rotates in _read_rotating(fields, num_layers))
        types = fields.texts("layer_types", FULL, SLIDING, count=num_layers)
        window = None if self.windows == "none" else read_window(fields, self.window)
        if window is None:
            if SLIDING in types:
                raise Unsupported(f"{fields.name}: layer_types has {SLIDING}, but there is no sliding_window")
            fields.ignore(_PATTERN)
            return (LayerKind(full),) * num_layers
        if self.windows == "all":
            types = (SLIDING,) * num_layers
        elif not types:
            key = next((name for name in _PATTERN if fields.has(name)), _PATTERN[0])
            period = fields.integer(key, self.period, maximum=MAX_LAYERS)
            types = tuple(SLIDING if (index + 1) % period else FULL for index in range(num_layers))
        fields.ignore(_PATTERN)
        kinds = {
            FULL: LayerKind(full, self.ropes[0]),
            SLIDING: LayerKind(dataclasses.replace(full, sliding_window=window), self.ropes[1]),
        }
        return tuple(kinds[name] for name in types)

    def write(self, kinds: tuple[LayerKind, ...]) -> dict[str, object]:
        """Return the keys that `read` reads."""
        if self.has_list:
            return {"no_rope_layers": [int(kind.rope is not None) for kind in kinds]}
        windows = [kind.attention.sliding_window for kind in kinds]
        found: dict[str, object] = {}
        if self.windows != "none":
            found["sliding_window"] = next((window for window in windows if window is not None), None)
        if self.windows == "types":
            found["layer_types"] = [FULL if window is None else SLIDING for window in windows]
        return found


def _read_rotating(fields: JsonFields, num_layers: int) -> list[bool]:
    """Return True for each layer whose queries and keys are rotated."""
    listed = fields.value("no_rope_layers")
    interval = fields.integer("no_rope_layer_interval", 4, maximum=MAX_LAYERS)
    if not listed:
        return [(index + 1) % interval != 0 for index in range(num_layers)]
    if not isinstance(listed, list) or len(listed) < num_layers or any(value not in (0, 1) for value in listed):
        raise fields.bad("no_rope_layers", f"is {listed!r}; it must be a list of {num_layers} numbers, 0 or 1")
    return [bool(value) for value in listed[:num_layers]]


_NAMES = Names()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertKeys:
    """Keys of a mixture of experts, with their defaults; a key may have the same value for each layer in a list.

    Attributes:
        num_shared: shared experts.
        first: number of the first layer with experts; None is 0.
        step: every `step`th layer has experts, unless `moe_layers` lists them (Llama 4); None is every one.
        normalises: weights are normalized; a default of the key `norm_topk_prob`, if `has_key`.
        scale: key of the factor of weights.
        has_groups: experts are chosen from the best groups, by the two best of each.
    """

    num_experts: tuple[str, int]
    top_k: tuple[str, int] = ("num_experts_per_tok", 8)
    width: tuple[str, int | None] = ("intermediate_size", None)
    num_shared: tuple[str, int] | int = 0
    first: tuple[str, int] | None = None
    step: tuple[str, int] | None = None
    scores: Literal["softmax", "sigmoid", "chosen", "sparsemixer"] = "softmax"
    choice_bias: bool = False
    normalises: bool = True
    has_key: bool = False
    scale: str = ""
    has_groups: bool = False
    weighs_inputs: bool = False
    jitter: str = ""

    def read(self, fields: JsonFields) -> Mixture:
        """Read the mixture."""
        fields.ignore(TRAINING)
        num_experts = _read_alike(fields, self.num_experts, MAX_EXPERTS)
        width = _read_alike(fields, self.width, MAX_WIDTH)
        shared = self.num_shared
        num_shared = shared if isinstance(shared, int) else _read_alike(fields, shared, MAX_EXPERTS, minimum=0)
        routing = Routing(
            num_experts,
            _read_alike(fields, self.top_k, num_experts),
            self.scores,
            normalises=fields.flag("norm_topk_prob", self.normalises) if self.has_key else self.normalises,
            scale=fields.number(self.scale, 1.0) if self.scale else 1.0,
            num_groups=fields.integer("n_group", 1) if self.has_groups else 1,
            top_groups=fields.integer("topk_group", 1) if self.has_groups else 1,
            num_best=2 if self.has_groups else 1,
            jitter=fields.number(self.jitter, 0.01) if self.jitter else 0.0,
        )
        if self.weighs_inputs and routing.top_k > 1:
            raise fields.bad(self.top_k[0], f"is {routing.top_k}; only one expert per token is supported")
        return Mixture(
            routing=routing,
            width=width,
            choice_bias=self.choice_bias,
            shared_width=num_shared * width,
            weighs_inputs=self.weighs_inputs,
        )

    def read_sparse(self, fields: JsonFields, num_layers: int) -> list[bool]:
        """Return True for each layer with experts."""
        first = 0 if self.first is None else fields.integer(*self.first, minimum=0, maximum=num_layers - 1)
        step = 1 if self.step is None else fields.integer(*self.step, maximum=num_layers)
        listed = None if self.step is None else fields.value("moe_layers")
        if listed is not None:
            if not isinstance(listed, list) or not listed or not all(index in range(num_layers) for index in listed):
                raise fields.bad("moe_layers", f"is {listed!r}; it must be a list of layers below {num_layers}")
            return [index in listed for index in range(num_layers)]
        return [index >= first and (index + 1) % step == 0 for index in range(num_layers)]

    def write(self, config: DecoderConfig) -> dict[str, object]:
        """Return the keys that are read."""
        mixture, sparse = config.mixture, [kind.is_sparse for kind in config.layer_kinds]
        assert mixture is not None
        routing = mixture.routing
        found: dict[str, object] = {
            self.num_experts[0]: routing.num_experts,
            self.top_k[0]: routing.top_k,
            self.width[0]: mixture.width,
        }
        if not isinstance(self.num_shared, int):
            found[self.num_shared[0]] = mixture.shared_width // mixture.width
        if self.first is not None:
            found[self.first[0]] = sparse.index(True)
        if self.step is not None:
            found["moe_layers"] = [index for index, has in enumerate(sparse) if has]
        if self.has_key:
            found["norm_topk_prob"] = routing.normalises
        if self.scale:
            found[self.scale] = routing.scale
        if self.has_groups:
            found |= {"n_group": routing.num_groups, "topk_group": routing.top_groups}
        return found | ({self.jitter: routing.jitter} if self.jitter else {})


def _read_alike(fields: JsonFields, key: tuple[str, int | None], maximum: int, *, minimum: int = 1) -> int:
    """Read a number, or a list of a number for each layer, which must all be equal."""
    name, default = key
    values = fields.value(name)
    if not isinstance(values, list):
        return fields.integer(name, default, minimum=minimum, maximum=maximum)
    if not values or any(value != values[0] for value in values):
        raise Unsupported(f"{fields.name}: {name} differs between layers; only equal numbers are supported")
    return JsonFields({name: values[0]}, fields.name).integer(name, minimum=minimum, maximum=maximum)


Ropes = Callable[[JsonFields, int, int], tuple[RopeConfig, ...]]
"""Reads ropes, given `max_position_embeddings` and the dimension of heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderVariant:
    """A family as data.

    Attributes:
        num_kv_heads: default for config.json; None is the number of query heads.
        head_dim: default for config.json; None derives it from hidden_size.
        length: default of `max_position_embeddings`.
        theta: default of `rope_theta`.
        fraction: default of `partial_rotary_factor`; None supports only full rotation.
        ropes: reads ropes in another way.
        ends: default (bos, eos).
        own: reads other fields of `DecoderConfig`.
        write_own: returns the keys that `own` reads.
        keys: by the field that each sets.
        fixed: fields that no key sets.
        only: keys with the value, or the tuple of values, that is supported.
        ignored: keys without effect.
        ignored_tensors: parts of the names of tensors without effect.
        experts: of sparse layers; None has none.
        ignores_later_layers: see `Family`.
        scale: key of the scale of attention scores, whose default is 1; if empty, it follows from the heads.
    """

    model_type: str
    names: Names = _NAMES
    num_kv_heads: int | None = None
    head_dim: int | None = None
    length: int = 2048
    theta: float = 10000.0
    fraction: float | None = None
    ropes: Ropes | None = None
    ends: tuple[int | None, tuple[int, ...]] = (1, (2,))
    keys: Mapping[str, Key]
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    layers: Layers = Layers()
    only: Mapping[str, object] = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    ignored_tensors: tuple[str, ...] = ()
    own: Callable[[JsonFields], dict[str, Any]] | None = None
    write_own: Callable[[DecoderConfig], dict[str, object]] | None = None
    experts: ExpertKeys | None = None
    ignores_later_layers: bool = False
    scale: str = ""
    lm_head: str = "lm_head.weight"

    def read(self, fields: JsonFields, architecture: str) -> DecoderConfig:
        """See `Family`."""
        fields.ignore(self.ignored)
        for key, value in self.only.items():
            values = value if isinstance(value, tuple) else (value,)
            fields.only(key, *values, why=f"{self.model_type} supports only {' or '.join(map(repr, values))}")
        sizes = read_sizes(fields)
        heads = read_heads(fields, sizes["hidden_size"], num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        length = fields.integer("max_position_embeddings", self.length)
        scale = fields.number(self.scale, 1.0) if self.scale else heads["head_dim"] ** -0.5
        own = {} if self.own is None else self.own(fields)
        settings: dict[str, Any] = {field: key.read(fields) for field, key in self.keys.items()}
        kinds, mixture = self.layers.read(fields, sizes["num_layers"], scale), None
        if self.experts is not None:
            mixture, sparse = self.experts.read(fields), self.experts.read_sparse(fields, len(kinds))
            kinds = tuple(dataclasses.replace(kind, is_sparse=has) for kind, has in zip(kinds, sparse, strict=True))
        settings = {**sizes, **heads, "max_position_embeddings": length, **settings, **own, **self.fixed}
        return DecoderConfig(
            architecture=architecture,
            bos_token_id=self.ends[0],
            eos_token_ids=self.ends[1],
            ropes=(self.ropes or self._ropes)(fields, length, heads["head_dim"]),
            kinds=kinds,
            mixture=mixture,
            **settings,
        )

    def to_hf(self, config: DecoderConfig) -> dict[str, object]:
        """See `Family`."""
        result: dict[str, object] = {
            "intermediate_size": config.intermediate_size,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "rope_parameters": write_ropes(config),
            "pad_token_id": None,  # otherwise transformers' default may exceed a small vocabulary
        }
        if self.scale:
            result[self.scale] = config.attention_kinds[0].scale
        result |= {key.name: key.write(getattr(config, field)) for field, key in self.keys.items()}
        result |= {} if self.experts is None else self.experts.write(config)
        result |= {} if self.write_own is None else self.write_own(config)
        return result | self.layers.write(config.layer_kinds)

    def family(self) -> Family[DecoderConfig]:
        """Return it for the registry."""
        family = decoder_family(
            self.model_type, self.read, self.to_hf, self.names, ignored=self.ignored_tensors, lm_head=self.lm_head
        )
        return dataclasses.replace(family, ignores_later_layers=self.ignores_later_layers)

    def _ropes(self, fields: JsonFields, length: int, head_dim: int) -> tuple[RopeConfig, ...]:
        return (RopeConfig.from_hf(fields, length, default_theta=self.theta, default_fraction=self.fraction),)


def write_ropes(config: DecoderConfig) -> dict[str, object]:
    """Return the `rope_parameters` of a config, which has one section for each kind of layers if it has two ropes."""
    if len(config.ropes) > 1:
        return {name: rope.to_hf() for name, rope in zip((FULL, SLIDING), config.ropes, strict=True)}
    (rope,) = config.ropes
    scale = config.query_scale
    written = rope.to_hf()
    if scale is not None and not scale.is_global:
        written["llama_4_scaling_beta"] = scale.beta
    return written
