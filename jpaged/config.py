"""The options, once: name, limits, help, default. The only reader of the environment.

    options as written      EngineConfig.load(...)     names and limits are checked, nothing is guessed
    -> resolved             .resolve(facts)            what depends on the model and the device is filled in
    -> explained            .explain()                 printed at start-up, line by line

A section is a frozen dataclass whose fields carry their own help and limits, so that the command line, `LLM(...)` and
the documentation are read off one place. The command line spells `max_model_len` as `--max-model-len`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from jpaged.errors import InvalidArgument


def option(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    unit: str = "",
) -> Any:
    """A field of a section: its default, its help line and its limits (both inclusive).

    A default of None means that the value is found when the configuration is resolved, or that the thing is left out.
    """
    return field(default=default, metadata={"help": help, "low": low, "high": high, "choices": choices, "unit": unit})


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model, and how its numbers are held."""

    model: str = option("demo", "`demo`, a folder in Hugging Face layout, or a hub id")
    dtype: str = option(
        "auto",
        "auto is the checkpoint's own on TPU and GPU, and float32 on CPU",
        choices=("auto", "float32", "bfloat16"),
    )
    load_format: str = option(
        "auto", "auto reads the checkpoint; dummy fills the shapes with random numbers", choices=("auto", "dummy")
    )
    max_model_len: int | None = option(
        None, "prompt and output tokens of one sequence at most; the model's own limit when left out", low=2
    )
    attention_backend: str = option(
        "auto",
        "whose attention kernels run; auto takes the device's own where they can, and says why where they cannot",
        choices=("auto", "xla", "pallas-tpu", "pallas-gpu", "cpu"),
    )
    seed: int = option(0, "where requests that bring no seed get theirs from", low=0, high=2**64 - 1)


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The pool of KV blocks."""

    block_size: int = option(16, "token slots in a block", low=1, high=1024, unit="tokens")
    num_blocks: int | None = option(
        None, "blocks in the pool; as many as memory and the longest batch ask for when left out", low=1
    )
    memory_utilization: float = option(
        0.9, "share of the device's memory that weights, programs and the pool may take", low=0.01, high=1.0
    )
    kv_cache_dtype: str = option(
        "auto",
        "how keys and values are kept; auto is as they are computed, int8 and fp8 hold two to four times the tokens",
        choices=("auto", "float32", "bfloat16", "int8", "fp8"),
    )
    swap_space: float = option(
        1.0, "host memory that groups are swapped out to, and cached prefixes kept in", low=0.0, high=4096.0, unit="GiB"
    )
    enable_prefix_caching: bool = option(True, "share the blocks of prompts that begin alike")
    enable_cascade_attention: bool = option(
        True, "read the blocks that several rows of a step begin with once for all of them, where that is quicker"
    )
    kv_policy: str = option(
        "paged",
        "paged gives blocks as tokens come; reserve-* keep contiguous room for a sequence's whole life: baselines",
        choices=("paged", "reserve-max", "reserve-pow2", "reserve-oracle"),
    )


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """Who runs in a step."""

    max_num_seqs: int = option(64, "rows of a step", low=1, high=4096)
    max_num_batched_tokens: int = option(512, "tokens of a step, all rows", low=8, high=1 << 20)
    policy: str = option("fcfs", "order of admission", choices=("fcfs", "priority", "fair"))
    preemption_mode: str = option(
        "auto",
        "when blocks run out: swap moves them to host memory, recompute runs the tokens again, auto is the quicker",
        choices=("auto", "recompute", "swap"),
    )
    batching: str = option(
        "continuous",
        "continuous admits at every step; static only when the whole batch has ended: a baseline",
        choices=("continuous", "static"),
    )
    overlap: bool = option(True, "prepare a step while the device still runs the one before")
    max_num_queued_reqs: int = option(4096, "waiting requests before new ones are refused", low=1, high=1 << 20)


@dataclass(frozen=True, slots=True)
class ParallelOptions:
    """How many devices run the model."""

    tensor_parallel_size: int = option(
        1, "devices that share one copy of the model: heads, feed-forward and vocabulary are split over them", low=1
    )


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What clients see, where they connect, and how the server ends."""

    served_model_name: str | None = option(None, "the name that clients see; the model's own when left out")
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 is every interface")
    port: int = option(50051, "port to listen on; 0 picks a free one", low=0, high=65535)
    shutdown_timeout: float = option(
        30.0, "after SIGTERM, running requests may take so long to finish", low=0.0, high=86400.0, unit="s"
    )
    enable_reflection: bool = option(True, "serve grpc.reflection, for grpcurl and the like")
    pin_prefix: str | None = option(
        None, "a text file: prompts that begin with its text, as it stands there, always find it computed"
    )
    metrics_port: int | None = option(
        None,
        "port that answers Prometheus, on the same host; 0 picks a free one, none when left out",
        low=0,
        high=65535,
    )


SECTIONS: dict[str, type] = {
    "model": ModelOptions,
    "cache": CacheOptions,
    "scheduler": SchedulerOptions,
    "parallel": ParallelOptions,
    "server": ServerOptions,
}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Every option, in its section. Frozen; `resolve` gives a new one in which nothing is None."""

    model: ModelOptions = field(default_factory=ModelOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    server: ServerOptions = field(default_factory=ServerOptions)

    @classmethod
    def load(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Builds a configuration from flat option names, checked against their limits.

        Raises:
            InvalidArgument: a name is unknown, or a value is of the wrong type or out of its limits.
        """
        known = {name for name, _, _ in iter_options()}
        for name in options:
            if name not in known:
                raise InvalidArgument(name, f"unknown option; the options are {', '.join(sorted(known))}")
        sections = {}
        for section, kind in SECTIONS.items():
            values = {f.name: _checked(f, options[f.name]) for f in fields(kind) if f.name in options}
            sections[section] = kind(**values)
        config = cls(**sections)
        config._check_together()
        return config

    def _check_together(self) -> None:
        max_rows, max_tokens = self.scheduler.max_num_seqs, self.scheduler.max_num_batched_tokens
        if max_tokens < max_rows:
            raise InvalidArgument(
                "max_num_batched_tokens", f"{max_tokens} is below max_num_seqs ({max_rows}): every row needs one token"
            )

    def resolve(self, found: Mapping[str, Any]) -> EngineConfig:
        """Fills in what only the model and the device could tell: option names and their final values."""
        sections = {}
        for section, kind in SECTIONS.items():
            values = {name: found[name] for name in field_names(kind) if name in found}
            sections[section] = dataclasses.replace(getattr(self, section), **values)
        return EngineConfig(**sections)

    def explain(self) -> list[tuple[str, str, str]]:
        """(option, value, where it came from) for every option; the value of a resolved configuration is final."""
        rows = []
        for name, section, spec in iter_options():
            value = getattr(getattr(self, section), name)
            unit = f" {spec.metadata['unit']}" if spec.metadata["unit"] else ""
            rows.append((name, f"{value}{unit}", "default" if value == spec.default else "set or resolved"))
        return rows


def iter_options() -> Iterator[tuple[str, str, dataclasses.Field[Any]]]:
    """(name, section, field) of every option, in the order in which they are documented."""
    for section, kind in SECTIONS.items():
        for spec in fields(kind):
            yield spec.name, section, spec


def field_names(section: type) -> tuple[str, ...]:
    """Names of the options in a section."""
    return tuple(spec.name for spec in fields(section))


def option_type(spec: dataclasses.Field[Any]) -> type:
    """The scalar type of an option: `int | None` is an int that may be left out."""
    return {"str": str, "int": int, "float": float, "bool": bool}[str(spec.type).removesuffix(" | None")]


def _checked(spec: dataclasses.Field[Any], value: Any) -> Any:
    meta, kind = spec.metadata, option_type(spec)
    if value is None and spec.default is None:
        return None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind:
        raise InvalidArgument(spec.name, f"{value!r} is not of type {kind.__name__}")
    if meta["choices"] and value not in meta["choices"]:
        raise InvalidArgument(spec.name, f"{value!r} is not one of {', '.join(meta['choices'])}")
    if meta["low"] is not None and not value >= meta["low"]:
        raise InvalidArgument(spec.name, f"{value} is below the limit of {meta['low']}")
    if meta["high"] is not None and not value <= meta["high"]:
        raise InvalidArgument(spec.name, f"{value} is above the limit of {meta['high']}")
    return value


@dataclass(frozen=True, slots=True)
class Environment:
    """What the process's environment says; read once, here.

    Attributes:
        compile_cache_dir: where compiled programs are kept between runs (JPAGED_CACHE_DIR, else the user's cache
            folder); None when JPAGED_CACHE_DIR is set to nothing, which turns the cache off.
    """

    compile_cache_dir: Path | None

    @classmethod
    def read(cls) -> Environment:
        chosen = os.environ.get("JPAGED_CACHE_DIR")
        if chosen is not None:
            return cls(compile_cache_dir=Path(chosen) / "programs" if chosen else None)
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        return cls(compile_cache_dir=Path(base) / "jpaged" / "programs")


def tpu_library() -> Path | None:
    """The libtpu.so that the environment names (TPU_LIBRARY_PATH), for processes that compile for TPUs."""
    path = os.environ.get("TPU_LIBRARY_PATH")
    return Path(path) if path else None


def child_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of this process for a child, with these variables set."""
    return {**os.environ, **variables}
