"""Rotary position embedding as a checkpoint describes it: the base, and how it is stretched beyond pretraining."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from jpaged.errors import InvalidArgument, Unsupported
from jpaged.models.json_fields import JsonFields

_MAX_FACTOR = 1 << 20
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]
_OPTIONAL = ("attention_factor", "mscale", "mscale_all_dim")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: the base and how it is stretched beyond the length of pretraining.

    Attributes:
        kind: the formula; the fields below are used by the kinds in brackets.
        theta: base of the geometric series of wavelengths.
        factor: how far positions are stretched (all but default).
        original_max_position_embeddings: length of pretraining (dynamic, llama3, yarn).
        low_freq_factor: wavelengths above original / this are stretched fully (llama3).
        high_freq_factor: wavelengths below original / this are left alone (llama3).
        beta_fast: rotations above which a dimension is left alone (yarn).
        beta_slow: rotations below which a dimension is stretched fully (yarn).
        attention_factor: scales cos and sin; None derives it from factor and the two mscales (yarn).
        mscale: numerator's weight in the derived attention factor (yarn).
        mscale_all_dim: denominator's weight (yarn).
        truncate: whether the ramp between the betas starts and ends at whole dimensions (yarn).
    """

    kind: RopeKind = "default"
    theta: float = 10000.0
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

    def __post_init__(self) -> None:
        if self.kind in ("dynamic", "llama3", "yarn") and self.original_max_position_embeddings < 1:
            raise InvalidArgument(
                "original_max_position_embeddings",
                f"is {self.original_max_position_embeddings}; {self.kind} needs the length of pretraining, at least 1",
            )

    @classmethod
    def from_hf(cls, config: JsonFields, max_position_embeddings: int) -> RopeConfig:
        """Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (transformers 4).

        Raises:
            Unsupported: a kind or a key that we do not compute.
            InvalidArgument: a value out of range, or two sections that contradict each other.
        """
        old, new = config.mapping("rope_scaling"), config.mapping("rope_parameters")
        if old and new and dict(old) != dict(new):
            raise config.bad("rope_scaling", "and rope_parameters are both given and differ; keep one")
        section = "rope_scaling" if old else "rope_parameters"
        rope = JsonFields(old or new, f"config.json {section}")
        kind = _rope_kind(rope)
        config.only("partial_rotary_factor", 1, 1.0, why="only fully rotated heads are supported")
        rope.only("partial_rotary_factor", 1, 1.0, why="only fully rotated heads are supported")
        outer_theta = config.number("rope_theta", 10000.0)
        theta = rope.number("rope_theta", outer_theta)
        rope.ignore(("finetuned",))
        original = max_position_embeddings
        if kind in ("dynamic", "llama3", "yarn"):
            original = rope.integer("original_max_position_embeddings", original)
            # transformers lets the outer field win, which Phi-3 style checkpoints carry.
            original = config.integer("original_max_position_embeddings", original)
        if kind == "dynamic" and original != max_position_embeddings:
            raise Unsupported(
                f"config.json {section}: original_max_position_embeddings is {original} and max_position_embeddings "
                f"{max_position_embeddings}; dynamic scaling starts at max_position_embeddings, so they must be equal"
            )
        factor = 1.0
        if kind != "default":
            implied = max_position_embeddings / original if kind == "yarn" else None
            factor = rope.number("factor", implied)
            if not 1 <= factor <= _MAX_FACTOR:
                raise rope.bad("factor", f"is {factor:g}; it must be from 1 to {_MAX_FACTOR}")
        own: dict[str, Any] = {}
        if kind == "llama3":
            low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
            if high <= low:
                raise rope.bad("high_freq_factor", f"is {high:g}; it must be above low_freq_factor, {low:g}")
            own = {"low_freq_factor": low, "high_freq_factor": high}
        if kind == "yarn":
            fast, slow = rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0)
            if fast < slow:
                raise rope.bad("beta_fast", f"is {fast:g}; it must be at least beta_slow, {slow:g}")
            own = {name: rope.number(name) for name in _OPTIONAL if rope.has(name)}
            own |= {"beta_fast": fast, "beta_slow": slow, "truncate": rope.flag("truncate", True)}
        result = cls(kind=kind, theta=theta, factor=factor, original_max_position_embeddings=original, **own)
        rope.finish()
        return result

    def to_hf(self) -> dict[str, object]:
        """The `rope_parameters` of config.json: the fields that this kind reads."""
        result: dict[str, object] = {"rope_type": self.kind, "rope_theta": self.theta}
        if self.kind != "default":
            result["factor"] = self.factor
        if self.kind in ("llama3", "yarn"):
            result["original_max_position_embeddings"] = self.original_max_position_embeddings
        if self.kind == "llama3":
            result |= {"low_freq_factor": self.low_freq_factor, "high_freq_factor": self.high_freq_factor}
        if self.kind == "yarn":
            result |= {"beta_fast": self.beta_fast, "beta_slow": self.beta_slow, "truncate": self.truncate}
            result |= {name: value for name in _OPTIONAL if (value := getattr(self, name)) is not None}
        return result


def _rope_kind(rope: JsonFields) -> RopeKind:
    fallback = rope.text("type", "default")
    kind = rope.text("rope_type", fallback)
    if kind not in get_args(RopeKind):
        raise Unsupported(f"RoPE type {kind!r} is not supported; supported: {', '.join(get_args(RopeKind))}")
    return cast(RopeKind, kind)
