"""Rotary position embedding as a checkpoint describes it: the base, and its scaling beyond pretraining."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from jpaged.errors import InvalidArgument, Unsupported
from jpaged.models.json_fields import JsonFields

_MAX_FACTOR = 1 << 20
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]
_KINDS_WITH_LENGTH = ("dynamic", "llama3", "yarn", "longrope")
_MAX_FACTORS = 1 << 12
_MSCALES = ("mscale", "mscale_all_dim")
_OPTIONAL = ("attention_factor", *_MSCALES)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: the base and its scaling beyond the length of pretraining.

    Attributes:
        kind: the formula; the fields below are used by the kinds in brackets.
        theta: base of the geometric series of wavelengths.
        fraction: share of each head's dimensions that are rotated, the first ones, or the first pairs.
        factor: scaling factor of positions (every kind except default); in longrope only for the attention factor.
        original_max_position_embeddings: length of pretraining (dynamic, llama3, yarn, longrope).
        low_freq_factor: wavelengths above original / this are stretched fully (llama3).
        high_freq_factor: wavelengths below original / this are unchanged (llama3).
        beta_fast: rotations above which a dimension is unchanged (yarn).
        beta_slow: rotations below which a dimension is stretched fully (yarn).
        attention_factor: scales cos and sin; None derives it from factor and the two mscales (yarn, longrope).
        mscale: numerator's weight in the derived attention factor (yarn).
        mscale_all_dim: denominator's weight (yarn).
        truncate: the ramp between the betas starts and ends at whole dimensions (yarn).
        short_factor: of each rotated pair's wavelength in sequences no longer than pretraining's (longrope).
        long_factor: in longer ones (longrope).
        sections: numbers of pairs that rotate by the position in time, of the row and of the column; empty if all
            rotate by the position.
        has_turns: the pairs of sections take turns, row after time and column after row, as far as a section goes.
    """

    kind: RopeKind = "default"
    theta: float = 10000.0
    fraction: float = 1.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    sections: tuple[int, ...] = ()
    has_turns: bool = False

    def __post_init__(self) -> None:
        if self.kind in _KINDS_WITH_LENGTH and self.original_max_position_embeddings < 1:
            raise InvalidArgument(
                "original_max_position_embeddings",
                f"is {self.original_max_position_embeddings}; {self.kind} requires the length of pretraining, at "
                "least 1",
            )

    def num_rotated(self, head_dim: int) -> int:
        """Return the number of dimensions of a head that are rotated, by an angle of zero if it is proportional."""
        return head_dim if self.kind == "proportional" else int(head_dim * self.fraction)

    @classmethod
    def from_hf(
        cls,
        config: JsonFields,
        max_position_embeddings: int,
        *,
        default_theta: float = 10000.0,
        default_fraction: float | None = None,
        default_original: int | None = None,
    ) -> RopeConfig:
        """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (transformers 4).

        Args:
            default_fraction: default fraction of rotated dimensions, if the family supports partial rotation; None is
                all.
            default_original: default length of pretraining, if the family has it outside the sections; None has no
                default.

        Raises:
            Unsupported: a kind or a key that is not implemented.
            InvalidArgument: a value out of range, or two sections that contradict each other.
        """
        old, new = config.mapping("rope_scaling"), config.mapping("rope_parameters")
        if old and new and dict(old) != dict(new):
            raise config.bad("rope_scaling", "and rope_parameters are both given and differ; keep one")
        section = "rope_scaling" if old else "rope_parameters"
        rope = JsonFields(old or new, f"config.json {section}")
        fraction = 1.0
        if default_fraction is None:
            for fields in (config, rope):
                fields.only("partial_rotary_factor", 1, 1.0, why="only full rotary embedding of a head is supported")
        else:
            fraction = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", default_fraction))
            if fraction > 1:
                raise config.bad("partial_rotary_factor", f"is {fraction:g}; the limit is 1")
        # In transformers the outer length of pretraining, which Phi-3 style checkpoints have, takes precedence.
        theta, original = config.number("rope_theta", default_theta), None
        is_outer = default_original is not None or config.has("original_max_position_embeddings")
        if cls._kind(rope) in _KINDS_WITH_LENGTH and is_outer:
            original = config.integer("original_max_position_embeddings", default_original)
        return cls.of_section(rope, max_position_embeddings, theta, fraction=fraction, original=original)

    @classmethod
    def of_section(
        cls,
        rope: JsonFields,
        max_position_embeddings: int,
        default_theta: float,
        *,
        fraction: float = 1.0,
        original: int | None = None,
    ) -> RopeConfig:
        """Read one section, all of it.

        Args:
            original: the length of pretraining, if it is given outside the section.

        Raises:
            Unsupported: a kind or a key that is not implemented.
            InvalidArgument: a value out of range.
        """
        kind = cls._kind(rope)
        theta = rope.number("rope_theta", default_theta)
        rope.ignore(("finetuned", "mrope_section", "mrope_interleaved"))  # sections are equal for text
        length = max_position_embeddings
        if kind in _KINDS_WITH_LENGTH:
            length = rope.integer("original_max_position_embeddings", length) if original is None else original
            rope.ignore(("original_max_position_embeddings",))
        if kind == "dynamic" and length != max_position_embeddings:
            raise Unsupported(
                f"{rope.name}: original_max_position_embeddings is {length} and max_position_embeddings "
                f"{max_position_embeddings}; dynamic scaling starts at max_position_embeddings, so they must be equal"
            )
        factor = 1.0
        if kind != "default":
            ratio = max_position_embeddings / length
            defaults = {"yarn": ratio, "longrope": max(ratio, 1.0), "proportional": 1.0}
            factor = rope.number("factor", defaults.get(kind))
            if not 1 <= factor <= _MAX_FACTOR:
                raise rope.bad("factor", f"is {factor:g}; it must be from 1 to {_MAX_FACTOR}")
        own = _OWN_FIELDS[kind](rope) if kind in _OWN_FIELDS else {}
        result = cls(
            kind=kind, theta=theta, fraction=fraction, factor=factor, original_max_position_embeddings=length, **own
        )
        rope.finish()
        return result

    def check(self, head_dim: int) -> None:
        """Check that it fits the heads.

        Raises:
            InvalidArgument: a number of dimensions that cannot be rotated, or a number of factors that does not match.
        """
        num_dims = self.num_rotated(head_dim)
        if num_dims < 2 or num_dims % 2:
            raise InvalidArgument(
                "partial_rotary_factor",
                f"is {self.fraction:g}, so {num_dims} of {head_dim} dimensions are rotated; it must be an even number",
            )
        if self.kind == "dynamic" and num_dims <= 2:
            raise InvalidArgument("head_dim", f"is {num_dims}; dynamic rotary embedding needs at least 4")
        if self.sections and (len(self.sections) != 3 or sum(self.sections) != num_dims // 2):
            needed = f"{num_dims} rotated dimensions need 3 that make {num_dims // 2}"
            raise InvalidArgument("mrope_section", f"is {list(self.sections)}; {needed}")
        for name in ("short_factor", "long_factor") if self.kind == "longrope" else ():
            if len(getattr(self, name)) != num_dims // 2:
                raise InvalidArgument(
                    name, f"has {len(getattr(self, name))} numbers; {num_dims} rotated dimensions need {num_dims // 2}"
                )

    @property
    def max_prefix_len(self) -> int | None:
        """Longest prefix whose rotation does not depend on later tokens; None means no limit."""
        return self.original_max_position_embeddings if self.kind in ("dynamic", "longrope") else None

    @staticmethod
    def _kind(rope: JsonFields) -> RopeKind:
        fallback = rope.text("type", "default")
        kind = rope.text("rope_type", fallback)
        kind = "longrope" if kind == "su" else kind  # the name in the first Phi-3 checkpoints
        if kind not in get_args(RopeKind):
            raise Unsupported(f"RoPE type {kind!r} is not supported; supported: {', '.join(get_args(RopeKind))}")
        return cast(RopeKind, kind)

    def to_hf(self) -> dict[str, object]:
        """Return the `rope_parameters` of config.json: the fields that this kind reads."""
        result: dict[str, object] = {"rope_type": self.kind, "rope_theta": self.theta}
        if self.kind != "default":
            result["factor"] = self.factor
        if self.sections:
            result["mrope_section"] = list(self.sections)
            result |= {"mrope_interleaved": True} if self.has_turns else {}
        if self.fraction != 1:
            result["partial_rotary_factor"] = self.fraction
        if self.kind in ("llama3", "yarn", "longrope"):
            result["original_max_position_embeddings"] = self.original_max_position_embeddings
        if self.kind == "llama3":
            result |= {"low_freq_factor": self.low_freq_factor, "high_freq_factor": self.high_freq_factor}
        if self.kind == "yarn":
            result |= {"beta_fast": self.beta_fast, "beta_slow": self.beta_slow, "truncate": self.truncate}
        if self.kind == "longrope":
            result |= {"short_factor": list(self.short_factor), "long_factor": list(self.long_factor)}
        if self.kind in ("yarn", "longrope"):
            result |= {name: value for name in _OPTIONAL if (value := getattr(self, name)) is not None}
        return result


def _llama3(rope: JsonFields) -> dict[str, Any]:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high < low:
        raise rope.bad("high_freq_factor", f"is {high:g}; it must be at least low_freq_factor, {low:g}")
    return {"low_freq_factor": low, "high_freq_factor": high}


def _yarn(rope: JsonFields) -> dict[str, Any]:
    fast, slow = rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0)
    if fast < slow:
        raise rope.bad("beta_fast", f"is {fast:g}; it must be at least beta_slow, {slow:g}")
    # transformers treats a zero among these as missing.
    given = [name for name in _OPTIONAL if rope.has(name) and not (name in _MSCALES and rope.value(name) == 0)]
    own: dict[str, Any] = {name: rope.number(name) for name in given}
    return own | {"beta_fast": fast, "beta_slow": slow, "truncate": rope.flag("truncate", True)}


def _longrope(rope: JsonFields) -> dict[str, Any]:
    own: dict[str, Any] = {name: rope.numbers(name, maximum=_MAX_FACTORS) for name in ("short_factor", "long_factor")}
    if rope.has("attention_factor"):
        own["attention_factor"] = rope.number("attention_factor")
    return own


_OWN_FIELDS: Mapping[RopeKind, Callable[[JsonFields], dict[str, Any]]] = {
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
