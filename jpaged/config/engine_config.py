"""All options, declared once: name, limits, help, default. The only reader of the environment.

    options as given        EngineConfig.load(...)     names and limits are checked, nothing is inferred
    -> resolved             .replace(num_blocks=9)     values that depend on the model and the device are filled in
    -> explained            .explain()                 those set or resolved are printed at startup

A section (`jpaged.config`) is a frozen dataclass whose fields carry help and limits, so that the command line,
`LLM(...)` and the documentation share one source. The command line spells `max_model_len` as `--max-model-len`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from jpaged.config.engine_options import (
    CacheOptions,
    LoraOptions,
    LossyOptions,
    MediaOptions,
    ModelOptions,
    ParallelOptions,
    SchedulerOptions,
    StartupOptions,
)
from jpaged.config.option import checked, declare_section, is_secret_name, shorten, without_credentials
from jpaged.config.server_options import (
    AccessOptions,
    HttpOptions,
    KVEventsOptions,
    RoleOptions,
    ServerOptions,
    TelemetryOptions,
    TimeoutOptions,
)
from jpaged.config.speculative import DEVICE_METHODS, NAME, SpeculativeOptions
from jpaged.distributed_env import MultiHost, find_multihost
from jpaged.errors import InternalError, InvalidArgument

_OF_COMPILERS = ("XLA_", "TF_XLA_", "LIBTPU_", "TPU_", "CUDA_", "NVIDIA_")
_EMBEDS_REQUEST_MIB = 16.0
"""Default maximum size of a message with input embeddings: 1500 tokens of 4096 numbers of 16 bits, as base64."""
_WITH_HEAD: Mapping[str, Any] = {"num_scheduler_steps": 1, "swap_space": 0.0}
_WITH_DP_ATTENTION: Mapping[str, Any] = {"swap_space": 0.0}
_OF_ENCODER: Mapping[str, Any] = {
    "swap_space": 0.0,
    "enable_prefix_caching": False,
    "num_scheduler_steps": 1,
    "enable_cascade_attention": False,
}
ENVIRONMENT: Mapping[str, str] = {
    "JPAGED_CACHE_DIR": "directory of the compiled-program cache; empty disables the cache",
    "JPAGED_CACHE_URL": "URL of object storage (fsspec) with compiled programs that servers share, such as gs://BUCKET/jpaged",
    "JPAGED_API_KEY": "API key that clients and commands send",
    "JPAGED_CLUSTER_SECRET": "secret shared by the processes that serve one model together; or --cluster-secret-file",
    "JPAGED_TRACEBACK": "1: print a traceback with each error",
    "XDG_CACHE_HOME": "base directory of the user's caches, including jpaged's",
    "MOONCAKE_CONFIG_PATH": "JSON file with options of the KV connector MooncakeStoreConnector",
    "TPU_LIBRARY_PATH": "path of the libtpu.so that compiles for TPUs",
    "XLA_CLIENT_MEM_FRACTION": "share of each GPU's memory for JAX's allocator; jpaged sets it to 0.95",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "deprecated name of XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false: JAX's allocator reserves a GPU's memory when it is needed",
    "TOKENIZERS_PARALLELISM": "whether tokenizers use threads of their own; jpaged sets it to false",
}
"""Environment variables that are read here, and their meaning."""
_OF_LIBRARIES = (*_OF_COMPILERS, "JAX_", "HF_", "GRPC_", "OTEL_", "OMP_", "SLURM_", "LWS_", "OMPI_", "MEGASCALE_")
"""Other environment variables that affect a server: those of libraries and launchers."""
GPU_MEMORY_SHARE_VARIABLE = "XLA_CLIENT_MEM_FRACTION"
DEPRECATED_GPU_MEMORY_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_SECRETS = (
    *("api_key", "hf_token"),
    *("api_keys", "tls_key", "cluster_secret_file", "prefill_api_key_file", "prefill_tls_key"),
)
"""Options that are secrets, and files of secrets; certificates are public."""
MIN_SECRET_BYTES = 16
"""Short secrets could be found by brute force from an observed handshake."""
PROCESS_OPTIONS = (
    *("coordinator", "num_processes", "process_id", "join_timeout", "cluster_secret_file"),
    *("heartbeat_interval", "heartbeat_timeout"),
)
"""Options of multi-process serving, which only `jpaged serve` supports."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Every option, by section. Frozen; `replace` returns a changed copy."""

    model: ModelOptions = declare_section(ModelOptions, "Model, data types and parsers.")
    cache: CacheOptions = declare_section(CacheOptions, "KV cache: block pool, prefix cache, host and disk offload.")
    lossy: LossyOptions = declare_section(
        LossyOptions, "Lossy KV cache: less memory, but outputs differ from the exact model's."
    )
    scheduler: SchedulerOptions = declare_section(SchedulerOptions, "Scheduling, batching and preemption.")
    parallel: ParallelOptions = declare_section(ParallelOptions, "Parallelism over devices and processes.")
    lora: LoraOptions = declare_section(LoraOptions, "LoRA adapters.")
    media: MediaOptions = declare_section(MediaOptions, "Images of requests.")
    startup: StartupOptions = declare_section(StartupOptions, "Compilation before the first request.")
    server: ServerOptions = declare_section(ServerOptions, "gRPC server: addresses, limits, services and shutdown.")
    http: HttpOptions = declare_section(HttpOptions, "OpenAI-compatible HTTP API.")
    access: AccessOptions = declare_section(AccessOptions, "Authentication, tenant quotas, TLS and audit.")
    telemetry: TelemetryOptions = declare_section(TelemetryOptions, "Traces and logs.")
    kv_events: KVEventsOptions = declare_section(KVEventsOptions, "KV cache events for routers.")
    timeouts: TimeoutOptions = declare_section(TimeoutOptions, "Request deadlines and engine watchdogs.")
    roles: RoleOptions = declare_section(RoleOptions, "Disaggregated prefill and decode.")

    @classmethod
    def load(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Build a configuration from flat option names, checked against their limits.

        Raises:
            InvalidArgument: a name is unknown, or a value has the wrong type or is out of range.
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
        if config.model.enable_prompt_embeds and options.get("max_request_size") is None:
            config = config.replace(max_request_size=_EMBEDS_REQUEST_MIB)
        if config.has_head:
            config = config._for_head(options)
        if config.parallel.enable_dp_attention:
            config = config._for_dp_attention(options)
        return config.replace(enable_lora=True) if config.lora.lora else config

    def _check_together(self) -> None:
        max_rows, max_tokens = self.scheduler.max_num_seqs, self.scheduler.max_num_batched_tokens
        if max_tokens is not None and max_rows is not None and max_tokens < max_rows:
            raise InvalidArgument(
                "max_num_batched_tokens", f"{max_tokens} is below max_num_seqs ({max_rows}): every row needs one token"
            )
        threshold, max_len = self.scheduler.long_prefill_token_threshold, self.model.max_model_len
        if max_len is not None and threshold > max_len:
            raise InvalidArgument("long_prefill_token_threshold", f"{threshold} is above max_model_len ({max_len})")
        caches_nothing = not self.cache.enable_prefix_caching or self.cache.kv_policy != "paged"
        if self.kv_events.kv_events_endpoint is not None and caches_nothing:
            raise InvalidArgument(
                "kv_events_endpoint",
                "there are no events to publish: prefixes are not cached (enable_prefix_caching, kv_policy)",
            )
        pool_bytes, num_blocks = self.cache.kv_cache_memory_bytes, self.cache.num_blocks
        if pool_bytes is not None and num_blocks is not None:
            raise InvalidArgument(
                "kv_cache_memory_bytes",
                f"{pool_bytes} and num_blocks ({num_blocks}) both set the size of the pool: give only one",
            )
        if pool_bytes is not None and self.startup.compiled is not None:
            raise InvalidArgument(
                "kv_cache_memory_bytes", f"{pool_bytes}: saved programs (compiled) have a fixed number of blocks"
            )
        if self.startup.compiled is not None and self.parallel.data_parallel_size > 1:
            raise InvalidArgument(
                "compiled",
                "saved programs run only on the first tensor_parallel_size devices; data_parallel_size is "
                f"{self.parallel.data_parallel_size}, but must be 1",
            )
        self.cache.check()
        self.lossy.check(self.cache, self.speculation.method if self.speculation and self.has_draft else None)
        self.parallel.check()
        self._check_stages()
        self._check_eplb()
        self._check_routed_experts()
        self.lora.check()
        self.media.check()
        self.timeouts.check()
        self.http.check()
        self._check_draft()

    def _check_eplb(self) -> None:
        """Reject options that conflict with balanced experts, whose arrays change while requests run."""
        if not self.parallel.enable_eplb:
            return
        refused: dict[str, tuple[object, object]] = {
            "context_parallel_size": (self.parallel.context_parallel_size, 1),
            "pipeline_parallel_size": (self.parallel.pipeline_parallel_size, 1),
            "enable_lora": (self.lora.enable_lora or bool(self.lora.lora), False),
            "role": (self.roles.role, "both"),
            "compiled": (self.startup.compiled, None),
        }
        if self.cache.store_option is not None:
            refused[self.cache.store_option] = (self.cache.described_store(), None)
        if self.speculation is not None and self.has_draft:
            refused[f"{NAME}.method"] = (self.speculation.method, "ngram or suffix")
        for other, (value, only) in refused.items():
            if value != only:
                raise InvalidArgument("enable_eplb", f"is on, and does not support {other} {value}; it must be {only}")

    def _check_routed_experts(self) -> None:
        """Reject options that conflict with returned experts, which are stored with the blocks of one device."""
        if not self.model.enable_return_routed_experts:
            return
        refused: dict[str, tuple[object, object]] = {
            "enable_eplb": (self.parallel.enable_eplb, False),
            "enable_dp_attention": (self.parallel.enable_dp_attention, False),
            "context_parallel_size": (self.parallel.context_parallel_size, 1),
            "pipeline_parallel_size": (self.parallel.pipeline_parallel_size, 1),
            "kv_policy": (self.cache.kv_policy, "paged"),
            "role": (self.roles.role, "both"),
            "compiled": (self.startup.compiled, None),
        }
        if self.cache.store_option is not None:
            refused[self.cache.store_option] = (self.cache.described_store(), None)
        for other, (value, only) in refused.items():
            if value != only:
                raise InvalidArgument(
                    "enable_return_routed_experts", f"is on, and does not support {other} {value}; it must be {only}"
                )

    def _check_stages(self) -> None:
        """Reject options that conflict with layers in stages."""
        if (size := self.parallel.pipeline_parallel_size) == 1:
            return
        if self.speculation is not None and self.has_draft:
            method = self.speculation.method
            raise InvalidArgument(
                "pipeline_parallel_size", f"{size}: {method} drafts are not split into stages; use ngram or suffix"
            )

    def _check_draft(self) -> None:
        """Reject options that conflict with a draft model or head, which shares the model's device."""
        if self.speculation is None or not self.has_draft:
            return
        method = self.speculation.method
        if self.model.enable_prompt_embeds:
            raise InvalidArgument(
                f"{NAME}.method",
                f"{method} reads tokens only (enable_prompt_embeds is True): use ngram or suffix",
            )
        for name in ("tensor_parallel_size", "context_parallel_size"):
            if method == "eagle3" and (size := getattr(self.parallel, name)) > 1:
                raise InvalidArgument(f"{NAME}.method", f"eagle3 runs on one device; {name} is {size}, but must be 1")
        if self.has_head and (size := self.parallel.context_parallel_size) > 1:
            raise InvalidArgument(
                f"{NAME}.method", f"{method} does not split contexts; context_parallel_size is {size}, but must be 1"
            )
        if self.lora.enable_lora or self.lora.lora:
            raise InvalidArgument(f"{NAME}.method", f"{method} does not support adapters (enable_lora is True)")

    def _for_head(self, given: Mapping[str, Any]) -> EngineConfig:
        """Return these options for a head, which must see each token once: single steps, and no swapping.

        Raises:
            InvalidArgument: an option was set to a conflicting value.
        """
        method = "" if self.speculation is None else self.speculation.method
        problem = f"{method} needs the hidden states of every token"
        if self.scheduler.num_scheduler_steps > 1:
            raise InvalidArgument(
                f"{NAME}.method",
                f"{problem}; num_scheduler_steps is {self.scheduler.num_scheduler_steps}, over the limit of 1",
            )
        if self.roles.role != "both":
            raise InvalidArgument(
                f"{NAME}.method", f"{problem}, so it cannot load prefixes from other servers; role is {self.roles.role}"
            )
        if (store := self.cache.store_option) is not None:
            limit = "must be 0" if store == "kv_disk_space" else "must be unset"
            raise InvalidArgument(f"{NAME}.method", f"{problem}, so it cannot load blocks; {store} {limit}")
        if given.get("swap_space") not in (None, 0, CacheOptions().swap_space):
            raise InvalidArgument(
                f"{NAME}.method", f"{problem}, so it cannot load blocks from host memory; swap_space must be 0"
            )
        return self.replace(**_WITH_HEAD)

    def _for_dp_attention(self, given: Mapping[str, Any]) -> EngineConfig:
        """Return these options for data-parallel attention: a device's blocks move nowhere.

        Raises:
            InvalidArgument: an option was set to a conflicting value.
        """
        cache, name = self.cache, "enable_dp_attention"
        refused: dict[str, tuple[object, object]] = {
            "context_parallel_size": (self.parallel.context_parallel_size, 1),
            "pipeline_parallel_size": (self.parallel.pipeline_parallel_size, 1),
            "kv_policy": (cache.kv_policy, "paged"),
            "batching": (self.scheduler.batching, "continuous"),
            "speculative_config": (self.scheduler.speculative_config, None),
            "enable_lora": (self.lora.enable_lora or bool(self.lora.lora), False),
            "kv_events_endpoint": (self.kv_events.kv_events_endpoint, None),
            "role": (self.roles.role, "both"),
            "compiled": (self.startup.compiled, None),
            "lossy_kv_window": (self.lossy.lossy_kv_window, None),
        }
        if cache.store_option is not None:
            refused[cache.store_option] = (cache.described_store(), None)
        if given.get("swap_space") not in (None, CacheOptions().swap_space):
            refused["swap_space"] = (cache.swap_space, 0.0)
        if cache.eviction_policy not in ("auto", "lru"):
            refused["eviction_policy"] = (cache.eviction_policy, "lru")
        for other, (value, only) in refused.items():
            if value != only:
                raise InvalidArgument(name, f"is on, and does not support {other} {value}; it must be {only}")
        return self.replace(**_WITH_DP_ATTENTION)

    def check_recurrent(self, architecture: str) -> None:
        """Reject options that conflict with recurrent layers.

        Raises:
            InvalidArgument: names the first such option.
        """
        allowed = {name: value for name, value in self._unshared.items() if name != "enable_lora"}
        self._refuse(allowed, f"{architecture} has recurrent state")

    @property
    def _unshared(self) -> dict[str, tuple[object, object]]:
        """Options of models whose blocks and state belong to one request: each value, and the only one allowed."""
        allowed: dict[str, tuple[object, object]] = {
            "context_parallel_size": (self.parallel.context_parallel_size, 1),
            "pipeline_parallel_size": (self.parallel.pipeline_parallel_size, 1),
            "num_processes": (self.parallel.num_processes or 1, 1),
            "kv_policy": (self.cache.kv_policy, "paged"),
            "enable_lora": (self.lora.enable_lora or bool(self.lora.lora), False),
            "kv_events_endpoint": (self.kv_events.kv_events_endpoint, None),
            "role": (self.roles.role, "both"),
            "compiled": (self.startup.compiled, None),
            "lossy_kv_window": (self.lossy.lossy_kv_window, None),
        }
        if (store := self.cache.store_option) is not None:
            allowed[store] = (self.cache.described_store(), None)
        return allowed

    def _refuse(self, allowed: Mapping[str, tuple[object, object]], reason: str) -> None:
        for name, (value, only) in allowed.items():
            if value != only:
                rule = "does not support the option" if only is None else f"requires {only}"
                raise InvalidArgument(name, f"is {value}, but {reason}, which {rule}")

    def check_encoder(self, architecture: str) -> None:
        """Reject options that conflict with an encoder, whose prompts are computed in one step each.

        Raises:
            InvalidArgument: names the first such option.
        """
        allowed = self._unshared | {
            "batching": (self.scheduler.batching, "continuous"),
            "speculative_config": (self.scheduler.speculative_config, None),
            "enable_dp_attention": (self.parallel.enable_dp_attention, False),
            "kv_cache_dtype": (self.cache.kv_cache_dtype, "auto"),
            "long_prefill_token_threshold": (self.scheduler.long_prefill_token_threshold, 0),
        }
        self._refuse(allowed, f"{architecture} is an encoder")

    def for_encoder(self, architecture: str) -> EngineConfig:
        """Return these options for an encoder, which generates nothing and shares no prefix.

        Raises:
            InvalidArgument: as `check_encoder`.
        """
        self.check_encoder(architecture)
        return self.replace(**_OF_ENCODER)

    @property
    def has_draft(self) -> bool:
        """True if a draft model or head on the device proposes tokens."""
        return self.speculation is not None and self.speculation.method in DEVICE_METHODS

    @property
    def has_head(self) -> bool:
        """True if the proposer uses hidden states of the model (EAGLE-3, MTP)."""
        return self.speculation is not None and self.speculation.has_head

    @property
    def speculation(self) -> SpeculativeOptions | None:
        """Options of speculative decoding; None if it is off.

        Raises:
            InvalidArgument: `speculative_config` is invalid; cannot happen for loaded options.
        """
        text = self.scheduler.speculative_config
        return None if text is None else SpeculativeOptions.parse(text)

    def multihost(self) -> MultiHost | None:
        """Return the rank of this process, from the options or a launcher; None for a single process.

        Raises:
            InvalidArgument: a launcher's variables cannot be parsed.
        """
        given = self.parallel
        if given.num_processes == 1:
            return None
        if given.coordinator is None or given.num_processes is None or given.process_id is None:
            return find_multihost(os.environ)
        return MultiHost(given.coordinator, given.num_processes, given.process_id, "the options")

    def cluster_secret(self) -> bytes | None:
        """Return the secret shared by several processes; None if there is none.

        Raises:
            InvalidArgument: it cannot be read, or is too short.
        """
        path = self.parallel.cluster_secret_file
        if path is None:
            name, text = "JPAGED_CLUSTER_SECRET", os.environ.get("JPAGED_CLUSTER_SECRET", "").encode()
            if not text:
                return None
        else:
            name = "cluster_secret_file"
            try:
                text = Path(path).read_bytes()
            except OSError as error:
                raise InvalidArgument(name, f"{path} cannot be read: {error.strerror or error}") from None
        secret = text.strip()
        if len(secret) < MIN_SECRET_BYTES:
            problem = f"has a secret of {len(secret)} bytes, below the limit of {MIN_SECRET_BYTES}"
            raise InvalidArgument(name, problem if path is None else f"{path} {problem}")
        return secret

    def for_multihost(self, multihost: MultiHost) -> EngineConfig:
        """Return these options for one of several processes, with its rank filled in.

        Raises:
            InvalidArgument: an option does not support several processes.
        """
        single = f"requires a single process (there are {multihost.num_processes}, from {multihost.source})"
        if (size := self.parallel.data_parallel_size) > 1 and multihost.num_processes % size:
            raise InvalidArgument(
                "data_parallel_size",
                f"{size} does not divide the {multihost.num_processes} processes (from {multihost.source}), of which "
                "each replica has equally many",
            )
        if self.startup.compiled is not None:
            raise InvalidArgument("compiled", f"{self.startup.compiled} {single}")
        if (store := self.cache.store_option) is not None:
            problem = f"{self.cache.described_store()}: each process has only a part of every block; it {single}"
            raise InvalidArgument(store, problem)
        if self.lora.enable_lora:
            raise InvalidArgument("enable_lora", f"True {single}")
        if self.speculation is not None and self.has_draft:
            raise InvalidArgument(f"{NAME}.method", f"{self.speculation.method} {single}")
        if self.roles.role != "both":
            raise InvalidArgument("role", f"{self.roles.role} {single}")
        if self.model.enable_prompt_embeds:
            raise InvalidArgument("enable_prompt_embeds", f"True {single}")
        place = {name: getattr(multihost, name) for name in ("coordinator", "num_processes", "process_id")}
        return self.replace(**place)

    def replace(self, **values: Any) -> EngineConfig:
        """Return these options with other values, unchecked: for values resolved from the model and the device."""
        sections = {}
        for section, kind in SECTIONS.items():
            mine = {name: values.pop(name) for name in field_names(kind) if name in values}
            sections[section] = dataclasses.replace(getattr(self, section), **mine)
        if values:
            raise InternalError(f"there are no options {', '.join(values)}")
        return EngineConfig(**sections)

    def explain(self) -> list[tuple[str, str, str]]:
        """Return (option, value, source) for every option; the values of a resolved configuration are final.

        Secrets and the paths of their files are shown as `(set)`, URLs without credentials, and a chat template by its
        first characters and its size.
        """
        rows = []
        for name, section, spec in iter_options():
            given = getattr(getattr(self, section), name)
            value = (", ".join(given) or None) if isinstance(given, tuple) else given
            if given and name in _SECRETS:
                value = "(set)"
            elif isinstance(value, str):
                value = without_credentials(value if name != "chat_template" else _template_start(value))
            elif isinstance(value, float):
                value = round(value, 6)
            unit = f" {spec.metadata['unit']}" if spec.metadata["unit"] and value is not None else ""
            rows.append((name, f"{value}{unit}", "default" if given == spec.default else "set or resolved"))
        return rows


SECTIONS: dict[str, type] = get_type_hints(EngineConfig)
SERVER_SECTIONS = ("server", "http", "access", "telemetry", "kv_events", "timeouts", "roles")
"""Sections that an engine without a server does not use."""


def section_help(section: str) -> str:
    """Return the help of a section; "" if it has none."""
    return next(spec.metadata.get("help", "") for spec in fields(EngineConfig) if spec.name == section)


def iter_options() -> Iterator[tuple[str, str, dataclasses.Field[Any]]]:
    """Yield (name, section, field) of every option, in the documented order."""
    for section, kind in SECTIONS.items():
        for spec in fields(kind):
            yield spec.name, section, spec


def platform_default(name: str, platform: str) -> Any:
    """Return an option's default on a platform (jax's name); an unknown platform counts as a GPU."""
    by_platform: dict[str, Any] = {other: spec.metadata["by_platform"] for other, _, spec in iter_options()}[name]
    return by_platform.get(platform, by_platform["gpu"])


def field_names(section: type) -> tuple[str, ...]:
    """Return the names of the options in a section."""
    return tuple(spec.name for spec in fields(section))


def server_field_names() -> tuple[str, ...]:
    """Return the names of the server's options: ports, access, telemetry."""
    return tuple(name for name, section, _ in iter_options() if section in SERVER_SECTIONS)


def compile_cache_dir() -> Path | None:
    """Return the cache folder of compiled programs: JPAGED_CACHE_DIR (None if empty), else in the user's cache.

    Raises:
        InvalidArgument: JPAGED_CACHE_DIR is a URL.
    """
    chosen = os.environ.get("JPAGED_CACHE_DIR")
    if chosen is not None:
        if "://" in chosen:
            problem = f"{shorten(chosen)} is a URL: must be a folder; JPAGED_CACHE_URL takes URLs"
            raise InvalidArgument("JPAGED_CACHE_DIR", problem)
        return Path(chosen) / "programs" if chosen else None
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "jpaged" / "programs"


def compile_cache_url() -> str | None:
    """Return the URL of object storage that servers share compiled programs in (JPAGED_CACHE_URL); None if not set.

    Raises:
        InvalidArgument: it is not a URL.
    """
    chosen = os.environ.get("JPAGED_CACHE_URL", "").strip()
    if chosen and "://" not in chosen:
        raise InvalidArgument("JPAGED_CACHE_URL", f"{shorten(chosen)} is not a URL; JPAGED_CACHE_DIR takes folders")
    return chosen.rstrip("/") or None


def compiler_environment_text() -> str:
    """Return the environment variables of XLA and accelerator compilers, as text."""
    return "\n".join(f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_OF_COMPILERS))


def api_key_from_environment() -> str:
    """Return the API key of commands for servers (JPAGED_API_KEY); "" if there is none."""
    return os.environ.get("JPAGED_API_KEY", "").strip()


def vllm_environment() -> dict[str, str]:
    """Return the environment variables of vLLM that are set: those whose names start with VLLM_."""
    return {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}


def proxy_from_environment() -> tuple[str, tuple[str, ...]]:
    """Return the HTTP proxy URL that gRPC reads from the environment, and the hosts reached without it."""
    proxy, excluded = (
        next(filter(None, (os.environ.get(name) for name in names)), "")
        for names in (("grpc_proxy", "https_proxy", "http_proxy"), ("no_grpc_proxy", "no_proxy"))
    )
    return proxy, tuple(filter(None, (host.strip() for host in excluded.split(","))))


def shows_traces() -> bool:
    """Return True if the command line should show tracebacks (JPAGED_TRACEBACK)."""
    return os.environ.get("JPAGED_TRACEBACK", "") not in ("", "0")


def tpu_library() -> Path | None:
    """Return the libtpu.so named by TPU_LIBRARY_PATH, for processes that compile for TPUs."""
    return Path(path) if (path := os.environ.get("TPU_LIBRARY_PATH")) else None


def mooncake_config_path() -> Path | None:
    """Return the file of options of Mooncake Store (MOONCAKE_CONFIG_PATH); None if there is none."""
    return Path(path) if (path := os.environ.get("MOONCAKE_CONFIG_PATH")) else None


def set_default_variables(variables: Mapping[str, str]) -> None:
    """Set environment variables of a library that are not set yet."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def keep_tokenizers_on_their_thread() -> None:
    """Make the tokenizers library use the calling thread: a few long texts would occupy the whole thread pool."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def gpu_memory_share() -> tuple[str, float] | None:
    """Return the variable that sets the share of a GPU for JAX's allocator, and its value; None if none is set.

    Raises:
        InvalidArgument: both variables are set, or the value is not a share.
    """
    text, deprecated = os.environ.get("XLA_CLIENT_MEM_FRACTION"), os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
    if text and deprecated:
        raise InvalidArgument(
            DEPRECATED_GPU_MEMORY_SHARE,
            f"{deprecated} is set next to {GPU_MEMORY_SHARE_VARIABLE}={text}, which JAX rejects; unset this one, which "
            "is deprecated",
        )
    name, text = (GPU_MEMORY_SHARE_VARIABLE, text) if text else (DEPRECATED_GPU_MEMORY_SHARE, deprecated)
    if not text:
        return None
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise InvalidArgument(name, f"{text!r} is not a share of a GPU's memory: above 0, and at most 1")
    return name, share


def preallocates_gpu_memory() -> bool:
    """Return True if JAX's allocator reserves a GPU's memory at once, which is JAX's default."""
    return os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "") not in ("false", "False", "0")


def set_gpu_memory_share(share: float) -> None:
    """Set the share of a GPU's memory for JAX's allocator, which reads it when JAX starts CUDA."""
    os.environ["XLA_CLIENT_MEM_FRACTION"] = str(share)


def explain_environment() -> list[tuple[str, str | None, str]]:
    """Return (variable, value, meaning) of the variables that jpaged reads, and of set variables of libraries.

    Possible secrets are shown as `(set)`, and URLs without credentials.
    """
    others = sorted(name for name in os.environ if name.startswith(_OF_LIBRARIES) and name not in ENVIRONMENT)
    rows = []
    for name, text in {**ENVIRONMENT, **dict.fromkeys(others, "")}.items():
        value = os.environ.get(name)
        if value:
            value = "(set)" if any(map(is_secret_name, name.split("_"))) else without_credentials(value)
        rows.append((name, value, text))
    return rows


def _template_start(text: str) -> str:
    """Return the first characters of a chat template and its size; a path of a file as it is."""
    is_short = len(text) <= 60 and "\n" not in text
    if is_short or not {*"{}\n"}.intersection(text):
        return text
    first_line = text.strip().partition("\n")[0]
    return f"{shorten(first_line)} ({len(text)} characters)"


def child_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of this process for a child, with these variables set."""
    return {**os.environ, **variables}


class ConfigView:
    """Values of a loaded model by vLLM's names, for code that reads them.

    Args:
        name: path of the object, for errors.
        advice: what to use for other attributes.
        lazy: attributes that are computed when they are first read.
    """

    def __init__(
        self, name: str, advice: str, lazy: Mapping[str, Callable[[], Any]] | None = None, /, **values: Any
    ) -> None:
        self.__dict__.update(values, _name=name, _advice=advice, _lazy=dict(lazy or {}))

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        if attribute in self._lazy:
            self.__dict__[attribute] = value = self._lazy[attribute]()
            return value
        known = ", ".join(sorted({*vars(self), *self._lazy} - {"_name", "_advice", "_lazy"}))
        raise AttributeError(f"{self._name}.{attribute} does not exist in jpaged: it has {known}; {self._advice}")
