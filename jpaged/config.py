"""The options, once: name, limits, help, default. The only reader of the environment.

    options as written      EngineConfig.load(...)     names and limits are checked, nothing is guessed
    -> resolved             .replace(num_blocks=9)     what depends on the model and the device is filled in
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
from typing import Any, Literal, get_args, get_type_hints

from jpaged.errors import InternalError, InvalidArgument
from jpaged.launchers import MultiHost, find_multihost, split_address
from jpaged.option import checked, option

Policy = Literal["fcfs", "priority", "fair"]
PreemptionMode = Literal["auto", "recompute", "swap"]
Batching = Literal["continuous", "static"]
KVPolicy = Literal["paged", "reserve-max", "reserve-pow2", "reserve-oracle"]
LinearBackend = Literal["cpu", "xla"]
Backend = Literal["xla", "pallas-tpu", "pallas-gpu", "pallas-triton", "cpu"]
"""Whose attention kernels run."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model, and how its numbers are held."""

    model: str = option("demo", "`demo`, a folder (Hugging Face's layout or ours), a GGUF file, or a hub id")
    dtype: str = option(
        "auto", "auto is the checkpoint's own on TPU and GPU, float32 on CPU", choices=("auto", "float32", "bfloat16")
    )
    quantization: str = option(
        "auto", "rounds the matrices of layers while they load; auto does not", choices=("auto", "int8", "int4", "fp8")
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
        choices=("auto", *get_args(Backend)),
    )
    linear_backend: str = option(
        "auto", "who multiplies: cpu packs the weights for a kernel of one CPU device", choices=("auto", "cpu", "xla")
    )
    seed: int = option(0, "where requests that bring no seed get theirs from", low=0, high=2**64 - 1)
    parse_special_tokens: bool = option(
        True,
        "take special tokens that are spelled out in prompts and messages for what they say; if not, they are text "
        "there, and only those that the chat template writes count",
    )


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The pool of KV blocks."""

    block_size: int | None = option(
        None,
        "token slots in a block; on TPUs 128 where sequences are long, or a device has few key/value heads",
        low=1,
        high=1024,
        unit="tokens",
        by_platform={"cpu": 16, "gpu": 32, "tpu": 64},
    )
    num_blocks: int | None = option(
        None, "blocks in the pool; as many as memory and the longest batch ask for when left out", low=1
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "memory of the pool on each device, the null block included, instead of num_blocks; the command line takes "
        "512M, 2G or 1.5G (of 1024), and 512m, 2g (of 1000)",
        low=1,
        unit="bytes",
    )
    memory_utilization: float | None = option(
        None,
        "share of the device's memory that weights, programs and the pool may take; the compiler says what programs do",
        low=0.01,
        high=1.0,
        by_platform={"cpu": 0.9, "gpu": 0.95, "tpu": 0.97},
    )
    kv_cache_dtype: str = option(
        "auto",
        "how keys and values are kept; auto is as they are computed, int8 and fp8 hold two to four times the tokens",
        choices=("auto", "float32", "bfloat16", "int8", "fp8"),
    )
    swap_space: float = option(
        1.0,
        "host memory that groups are swapped out to, and cached prefixes kept in; of all replicas together",
        low=0.0,
        high=4096.0,
        unit="GiB",
    )
    enable_prefix_caching: bool = option(True, "share the blocks of prompts that begin alike")
    enable_cascade_attention: bool = option(
        True, "read the blocks that several rows of a step begin with once for all of them, where that is quicker"
    )
    kv_policy: KVPolicy = option(
        "paged",
        "paged gives blocks as tokens come; reserve-* keep contiguous room for a sequence's whole life: baselines",
        choices=get_args(KVPolicy),
    )


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """Who runs in a step."""

    max_num_seqs: int | None = option(
        None,
        "rows of a step; when left out up to 512 where the device's memory holds so many sequences, no more than "
        "max_num_batched_tokens, and no more than block tables of the longest sequences allow a TPU's kernel",
        low=1,
        high=4096,
        by_platform={"cpu": 64, "gpu": 128, "tpu": 128},
    )
    max_num_batched_tokens: int | None = option(
        None,
        "tokens of a step, all rows; when left out no fewer than max_num_seqs, and up to 4096 as the device asks for",
        low=8,
        high=1 << 20,
        by_platform={"cpu": 512, "gpu": 1024, "tpu": 1024},
    )
    policy: Policy = option("fcfs", "order of admission", choices=get_args(Policy))
    preemption_mode: PreemptionMode = option(
        "auto", "when blocks run out: swap to host memory, recompute, or the quicker", choices=get_args(PreemptionMode)
    )
    batching: Batching = option(
        "continuous", "static admits only when the whole batch has ended: a baseline", choices=get_args(Batching)
    )
    overlap: bool = option(True, "prepare a step while the device still runs the one before")
    num_scheduler_steps: int = option(
        0,
        "decode steps in one dispatch, while nobody can join; 0 is up to 8 on CPUs, 2 elsewhere, of 0.02 s at most, "
        "or 0.05 s with all rows taken and no row that may end early; -1 is 0 without a bound for those (LLM's own)",
        low=-1,
        high=16,
    )
    max_inter_token_latency: float = option(
        0.2,
        "beside streams, prompts are computed in parts so small that none of these waits longer for its next token, as "
        "far as the device can: prompts may always make a step half as long again. 0 is no bound",
        low=0.0,
        high=3600.0,
        unit="s",
    )
    max_num_queued_reqs: int = option(4096, "waiting requests before new ones are refused", low=1, high=1 << 20)


@dataclass(frozen=True, slots=True)
class ParallelOptions:
    """How many devices run the model: the product of the sizes."""

    tensor_parallel_size: int = option(
        1,
        "devices that share one copy of the model: heads, feed-forward and vocabulary are split over them; "
        "1 is all of them where there are several processes",
        low=1,
    )
    data_parallel_size: int = option(
        1,
        "copies of the model behind one service, each with devices and a pool of its own; max_num_seqs and num_blocks "
        "are of each, swap_space and max_num_queued_reqs are shared out; a request goes where its prefix is cached, "
        "then where the load is least",
        low=1,
    )
    enable_expert_parallel: bool = option(False, "devices of a copy have some experts whole, not a part of each")
    coordinator: str | None = option(
        None,
        "HOST:PORT of process 0, the same for all; found in the environment of LeaderWorkerSet, GKE TPU pods, Slurm "
        "and Open MPI when left out; port 0 lets process 0 pick one and print it",
    )
    num_processes: int | None = option(
        None, "processes that serve one model together; 1 keeps to this one, whatever the environment says", low=1
    )
    process_id: int | None = option(None, "which of them this is; process 0 opens the port", low=0)
    join_timeout: float = option(
        300.0, "how long processes wait for each other when they start", low=1.0, high=86400.0, unit="s"
    )

    def check(self) -> None:
        """Holds the three options of several processes to each other.

        Raises:
            InvalidArgument: one is missing, malformed or beyond another.
        """
        if self.coordinator is None or self.num_processes is None or self.process_id is None:
            given = {name: getattr(self, name) for name in ("coordinator", "num_processes", "process_id")}
            missing = [name for name, value in given.items() if value is None]
            if len(missing) == len(given) or (self.num_processes == 1 and len(missing) == 2):
                return
            raise InvalidArgument(missing[0], f"is missing: {', '.join(given)} go together")
        if self.process_id >= self.num_processes:
            raise InvalidArgument(
                "process_id", f"{self.process_id} is not below num_processes ({self.num_processes}); they count from 0"
            )
        _, port = split_address("coordinator", self.coordinator)
        if port == 0 and self.process_id != 0:
            raise InvalidArgument(
                "coordinator", f"{self.coordinator}: only process 0 can pick a port; name the port it took"
            )

    def multihost(self) -> MultiHost | None:
        """The place of this process among several: the options', else a launcher's; None where it is alone.

        Raises:
            InvalidArgument: a launcher's variables cannot be understood.
        """
        if self.num_processes == 1:
            return None
        if self.coordinator is None or self.num_processes is None or self.process_id is None:
            return find_multihost(os.environ)
        return MultiHost(self.coordinator, self.num_processes, self.process_id, "the options")


_OF_COMPILERS = ("XLA_", "TF_XLA_", "LIBTPU_", "TPU_", "CUDA_", "NVIDIA_")
PROCESS_OPTIONS = ("coordinator", "num_processes", "process_id", "join_timeout")
"""The options of one of several processes, which only `jpaged serve` can be."""


@dataclass(frozen=True, slots=True)
class StartupOptions:
    """What has to be there before the first step."""

    wait_for_all_programs: bool = option(
        False, "start when every program is compiled, not when those are that any step can be padded to"
    )
    compiled: str | None = option(
        None,
        "a folder of programs that `jpaged plan --save` wrote for this model, these options and these devices: what "
        "is there is loaded, not compiled; num_blocks is theirs when left out",
    )


@dataclass(frozen=True, slots=True)
class LoraOptions:
    """Adapters beside the model: in how many slots of the device, and which ones from the start."""

    enable_lora: bool = option(False, "take requests for adapters (LoRA); on where `lora` names any")
    max_loras: int = option(
        8,
        "adapters that the rows of one step may have: each has room on the device for matrices of max_lora_rank",
        low=1,
        high=256,
    )
    max_lora_rank: int = option(16, "rank of an adapter at most", low=1, high=512)
    max_cpu_loras: int = option(
        256, "adapters that are loaded at one time, in host memory; further ones are refused", low=1, high=1 << 16
    )
    lora: tuple[str, ...] = option((), "NAME=PATH: an adapter from the start, a folder as PEFT writes them")

    @property
    def adapters(self) -> tuple[tuple[str, str], ...]:
        """The name and the path of each that is loaded at the start."""
        return tuple((name, path) for name, _, path in (one.partition("=") for one in self.lora))

    def check(self) -> None:
        """Holds what is loaded at the start to its form and its number.

        Raises:
            InvalidArgument: a name or a path is missing, a name comes twice, or there are too many.
        """
        for one, (name, path) in zip(self.lora, self.adapters, strict=True):
            if not name or not path:
                raise InvalidArgument("lora", f"{one!r} is not NAME=PATH")
        names = [name for name, _ in self.adapters]
        for name in names:
            if names.count(name) > 1:
                raise InvalidArgument("lora", f"{name!r} is given {names.count(name)} times: a name is for one adapter")
        if len(names) > self.max_cpu_loras:
            raise InvalidArgument("lora", f"{len(names)} adapters are over max_cpu_loras ({self.max_cpu_loras})")
        if self.max_cpu_loras < self.max_loras:
            raise InvalidArgument(
                "max_cpu_loras", f"{self.max_cpu_loras} is below max_loras ({self.max_loras}): slots would stay empty"
            )


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What clients see, where they connect, and how the server ends."""

    served_model_name: str | None = option(None, "the name that clients see; the model's own when left out")
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 is every interface")
    port: int = option(50051, "port to listen on; 0 picks a free one", low=0, high=65535)
    max_request_size: float = option(
        1.0,
        "the largest message from a client; prompts of 131072 tokens, as text or ids, have half of it. It is read on "
        "the thread that serves every stream, which takes 40 ms a MiB at worst",
        low=0.0625,
        high=64.0,
        unit="MiB",
    )
    max_connections: int = option(
        512,
        "connections at one time, and half as many as the process may have open files at most; further ones are closed",
        low=1,
        high=1 << 20,
    )
    connection_idle_timeout: float = option(
        300.0, "a connection without a call is closed after so long", low=0.1, high=86400.0, unit="s"
    )
    max_messages_per_second: int | None = option(
        None,
        "messages that all streams together are sent in a second: where there would be more, several tokens of a "
        "stream go in one. No token waits longer than 0.1 s for that, and a stream's first and last not at all. A "
        "message takes 0.1 ms of a processor, which on CPUs is the model's",
        low=1,
        high=1_000_000,
        by_platform={"cpu": 500, "gpu": 5000, "tpu": 5000},
    )
    shutdown_timeout: float = option(
        30.0, "after SIGTERM, running requests may take so long to finish", low=0.0, high=86400.0, unit="s"
    )
    enable_reflection: bool = option(True, "serve grpc.reflection, for grpcurl and the like")
    disable_control: bool = option(
        False,
        "answer Abort, PinPrefix, LoadAdapter and what undoes them with PERMISSION_DENIED",
    )
    isolate_tenants: bool = option(
        True,
        "tenants (request metadata x-jpaged-tenant) share no cached prefix, no name of a pinned one and no request id; "
        "off, the tenant counts for the policy fair alone",
    )
    max_pinned_blocks: int | None = option(
        None,
        "blocks that pinned prefixes may hold, in the pool of each replica; a quarter of it, as far as a request of "
        "max_model_len can do with the rest, when left out",
        low=0,
    )
    pin_prefix: str | None = option(
        None, "a text file: prompts that begin with its text, as it stands there, always find it computed"
    )
    metrics_port: int | None = option(
        None,
        "port that answers Prometheus, on the same host; 0 picks a free one, none when left out",
        low=0,
        high=65535,
    )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Every option, in its section. Frozen; `replace` gives another."""

    model: ModelOptions = field(default_factory=ModelOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    lora: LoraOptions = field(default_factory=LoraOptions)
    startup: StartupOptions = field(default_factory=StartupOptions)
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
            values = {f.name: checked(f, options[f.name]) for f in fields(kind) if f.name in options}
            sections[section] = kind(**values)
        config = cls(**sections)
        config._check_together()
        return config.replace(enable_lora=True) if config.lora.lora else config

    def _check_together(self) -> None:
        max_rows, max_tokens = self.scheduler.max_num_seqs, self.scheduler.max_num_batched_tokens
        if max_tokens is not None and max_rows is not None and max_tokens < max_rows:
            raise InvalidArgument(
                "max_num_batched_tokens", f"{max_tokens} is below max_num_seqs ({max_rows}): every row needs one token"
            )
        pool_bytes, num_blocks = self.cache.kv_cache_memory_bytes, self.cache.num_blocks
        if pool_bytes is not None and num_blocks is not None:
            raise InvalidArgument(
                "kv_cache_memory_bytes", f"{pool_bytes} and num_blocks ({num_blocks}) both size the pool: give one"
            )
        if pool_bytes is not None and self.startup.compiled is not None:
            raise InvalidArgument(
                "kv_cache_memory_bytes", f"{pool_bytes}: saved programs (compiled) are for a number of blocks"
            )
        if self.startup.compiled is not None and self.parallel.data_parallel_size > 1:
            raise InvalidArgument(
                "compiled",
                "saved programs run on the first tensor_parallel_size devices alone; data_parallel_size is "
                f"{self.parallel.data_parallel_size}, the limit with them is 1",
            )
        self.parallel.check()
        self.lora.check()

    def for_multihost(self, multihost: MultiHost) -> EngineConfig:
        """These options in one of several processes, with its place among them filled in.

        Raises:
            InvalidArgument: one of them is for one process alone.
        """
        several = f"not with several processes (there are {multihost.num_processes}, from {multihost.source})"
        if self.parallel.data_parallel_size > 1:
            raise InvalidArgument(
                "data_parallel_size", f"{self.parallel.data_parallel_size} works in one process, {several}"
            )
        if self.startup.compiled is not None:
            raise InvalidArgument("compiled", f"{self.startup.compiled}: saved programs run in one process, {several}")
        if self.lora.enable_lora:
            raise InvalidArgument("enable_lora", f"True: adapters are served by one process, {several}")
        place = {name: getattr(multihost, name) for name in ("coordinator", "num_processes", "process_id")}
        return self.replace(**place)

    def replace(self, **values: Any) -> EngineConfig:
        """Return these options with other values, unchecked: what only the model and the device could tell."""
        sections = {}
        for section, kind in SECTIONS.items():
            mine = {name: values.pop(name) for name in field_names(kind) if name in values}
            sections[section] = dataclasses.replace(getattr(self, section), **mine)
        if values:
            raise InternalError(f"there are no options {', '.join(values)}")
        return EngineConfig(**sections)

    def explain(self) -> list[tuple[str, str, str]]:
        """(option, value, where it came from) for every option; the value of a resolved configuration is final."""
        rows = []
        for name, section, spec in iter_options():
            given = getattr(getattr(self, section), name)
            value = (", ".join(given) or None) if isinstance(given, tuple) else given
            unit = f" {spec.metadata['unit']}" if spec.metadata["unit"] and value is not None else ""
            rows.append((name, f"{value}{unit}", "default" if given == spec.default else "set or resolved"))
        return rows


SECTIONS: dict[str, type] = get_type_hints(EngineConfig)


def iter_options() -> Iterator[tuple[str, str, dataclasses.Field[Any]]]:
    """(name, section, field) of every option, in the order in which they are documented."""
    for section, kind in SECTIONS.items():
        for spec in fields(kind):
            yield spec.name, section, spec


def platform_default(name: str, platform: str) -> Any:
    """What an option is on a platform, as jax calls it, unless it is chosen; one that is not known is like a GPU."""
    by_platform: dict[str, Any] = {other: spec.metadata["by_platform"] for other, _, spec in iter_options()}[name]
    return by_platform.get(platform, by_platform["gpu"])


def field_names(section: type) -> tuple[str, ...]:
    """Names of the options in a section."""
    return tuple(spec.name for spec in fields(section))


def compile_cache_dir() -> Path | None:
    """Where compiled programs are kept between runs: in JPAGED_CACHE_DIR, nowhere if that is empty, else the user's."""
    chosen = os.environ.get("JPAGED_CACHE_DIR")
    if chosen is not None:
        return Path(chosen) / "programs" if chosen else None
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "jpaged" / "programs"


def compiler_environment_text() -> str:
    """What the environment tells XLA and its compilers of accelerators, as text."""
    return "\n".join(f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_OF_COMPILERS))


def shows_traces() -> bool:
    """Whether the command line shows where in the program an error came up (JPAGED_TRACEBACK)."""
    return os.environ.get("JPAGED_TRACEBACK", "") not in ("", "0")


def tpu_library() -> Path | None:
    """The libtpu.so that the environment names (TPU_LIBRARY_PATH), for processes that compile for TPUs."""
    return Path(path) if (path := os.environ.get("TPU_LIBRARY_PATH")) else None


def keep_tokenizers_on_their_thread() -> None:
    """Tells the tokenizers library to work on the thread that asks: a few long texts would take all of its own."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def child_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of this process for a child, with these variables set."""
    return {**os.environ, **variables}
