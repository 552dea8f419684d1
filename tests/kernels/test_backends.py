"""Which backend runs, and what is said of those that do not."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jpaged.config import ModelOptions
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.paged_attention import AttentionSpec, Queries, choose
from jpaged.kernels.paged_attention.api import IMPLEMENTATIONS, Implementation, implementation

LAYOUT = KVLayout(1, 4, 16, 2, 64, jnp.dtype("float32"))
SPEC = AttentionSpec(LAYOUT, AttentionKind(0.125))
QUERIES = Queries(4, jnp.dtype("float32"), 8, 4, 16)


@dataclasses.dataclass(frozen=True)
class Device:
    platform: str
    device_kind: str = "some device"
    compute_capability: str = "8.0"


def choose_on(platform: str, name: str = "auto") -> Any:
    device: Any = Device(platform)
    return choose(name, device, LAYOUT, QUERIES)


def _agrees(*arguments: object) -> None:
    """Refuses nothing."""


def planted(monkeypatch: pytest.MonkeyPatch, **how: Any) -> None:
    """A backend that is preferred to all others."""
    made: dict[str, Any] = {**dict.fromkeys(("attend", "update", "platform")), "form": "tpu"}
    made |= {"unsupported_reason": _agrees, "unsupported_device_reason": _agrees, **how}
    table: dict[Any, Implementation] = {"planted": Implementation(**made), **IMPLEMENTATIONS}
    monkeypatch.setattr("jpaged.kernels.paged_attention.api.IMPLEMENTATIONS", table)


def test_options_name_every_backend() -> None:
    spec = next(f for f in dataclasses.fields(ModelOptions) if f.name == "attention_backend")
    assert set(spec.metadata["choices"]) == {"auto", *IMPLEMENTATIONS}


def test_xla_runs_everywhere_and_comes_last() -> None:
    assert list(IMPLEMENTATIONS)[-1] == "xla"
    for platform, form in (("cpu", "cpu"), ("gpu", "gpu"), ("tpu", "gpu")):
        chosen = choose_on(platform, "xla")
        assert (chosen.backend, chosen.layout.form, chosen.passed_over) == ("xla", form, ())


def test_auto_takes_the_first_that_can_in_its_own_form(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch)
    chosen = choose_on("gpu")
    assert (chosen.backend, chosen.layout.form) == ("planted", "tpu")


def test_auto_says_why_it_passed_over_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, unsupported_reason=lambda spec, queries: f"{queries.num_heads} heads are odd")
    assert choose_on("gpu").passed_over[0] == ("planted", "4 heads are odd")


def test_auto_says_nothing_of_what_is_made_for_other_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, platform="tpu")
    assert choose_on("tpu").backend == "planted"
    assert choose_on("cpu").backend != "planted"
    assert {backend for backend, _ in choose_on("cpu").passed_over} <= {"cpu"}
    assert {backend for backend, _ in choose_on("gpu").passed_over} == {"pallas-gpu"}  # sm_80: not Hopper


@pytest.mark.parametrize("where", ["unsupported_reason", "unsupported_device_reason"])
def test_a_backend_that_was_named_is_not_replaced(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    planted(monkeypatch, **{where: lambda *args: "it is Tuesday"})
    with pytest.raises(Unsupported, match="attention_backend: planted cannot run here: it is Tuesday"):
        choose_on("cpu", "planted")


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(Unsupported, match="'magic' is not one of auto, "):
        choose_on("cpu", "magic")


def test_a_pool_of_another_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch)
    with pytest.raises(Unsupported, match="planted requires pools of form tpu, not cpu"):
        implementation("planted", SPEC, QUERIES)  # type: ignore[arg-type]


def test_this_machine_has_a_backend() -> None:
    assert choose("auto", jax.devices()[0], LAYOUT, QUERIES).backend in IMPLEMENTATIONS


def test_a_float32_model_over_a_pool_of_16_bits_is_passed_over_before_it_is_traced() -> None:
    hopper: Any = Device("gpu", compute_capability="9.0")
    layout = dataclasses.replace(LAYOUT, dtype=jnp.dtype("bfloat16"))
    chosen = choose("auto", hopper, layout, QUERIES)
    assert chosen.backend == "pallas-triton"
    ((backend, reason),) = chosen.passed_over
    assert (backend, reason[:52]) == ("pallas-gpu", "queries are float32 and the pool has bfloat16; queri")
    same = dataclasses.replace(QUERIES, dtype=jnp.dtype("bfloat16"))
    assert choose("auto", hopper, layout, same).backend == "pallas-gpu"


@pytest.mark.parametrize("capability", ["8.0", "8.6", "8.9", "10.0", "12.0"])
def test_gpus_other_than_hopper_have_a_kernel(capability: str) -> None:
    device: Any = Device("gpu", compute_capability=capability)
    chosen = choose("auto", device, LAYOUT, QUERIES)
    assert (chosen.backend, chosen.layout.form) == ("pallas-triton", "gpu")
    older: Any = Device("gpu", compute_capability="7.5")
    chosen = choose("auto", older, LAYOUT, QUERIES)
    assert chosen.backend == "xla"
    assert [backend for backend, _ in chosen.passed_over] == ["pallas-gpu", "pallas-triton", "cuda"]


def test_steps_beyond_a_tpus_scalar_memory_are_refused_before_they_are_traced() -> None:
    tpu: Any = Device("tpu")
    layout = dataclasses.replace(LAYOUT, num_kv_heads=8, head_dim=128)
    queries = dataclasses.replace(QUERIES, num_heads=32)
    assert choose("pallas-tpu", tpu, layout, queries).backend == "pallas-tpu"
    long = dataclasses.replace(queries, num_rows=256, table_width=65536)
    assert choose("pallas-tpu", tpu, layout, long).backend == "pallas-tpu"
    large = dataclasses.replace(queries, num_tokens=2**17)
    with pytest.raises(Unsupported, match=r"pallas-tpu cannot run here: the step lists of .* require 10\d\d KiB"):
        choose("pallas-tpu", tpu, layout, large)


@pytest.mark.parametrize(
    ("field", "value"),
    [("scale", 0.0), ("scale", -0.1), ("scale", float("nan")), ("sliding_window", 0), ("soft_cap", 0.0)],
)
def test_an_attention_that_means_nothing_is_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=rf"{field}.*{value}"):
        dataclasses.replace(AttentionKind(0.1), **{field: value})
