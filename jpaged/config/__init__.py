"""All options, declared once: name, limits, help, default.

engine_config.py   all sections together: load, resolve, explain; and the environment
speculative.py     speculative decoding
option.py          declaration and validation of an option
engine_options.py  the sections of an engine, with disaggregated prefill and lossy options
server_options.py  the sections of a server, and timeouts of requests and steps
"""

from jpaged.config.engine_config import (
    ENVIRONMENT,
    PROCESS_OPTIONS,
    SECTIONS,
    EngineConfig,
    api_key_from_environment,
    child_environment,
    compile_cache_dir,
    compiler_environment_text,
    explain_environment,
    field_names,
    iter_options,
    keep_tokenizers_on_their_thread,
    platform_default,
    proxy_from_environment,
    section_help,
    server_field_names,
    shows_traces,
    tpu_library,
)
from jpaged.config.engine_options import (
    Backend,
    Batching,
    CacheOptions,
    EvictionPolicyName,
    KVPolicy,
    LinearBackend,
    LoraOptions,
    LossyOptions,
    ModelOptions,
    ParallelOptions,
    Policy,
    PreemptionMode,
    Role,
    RoleOptions,
    SchedulerOptions,
    StartupOptions,
)
from jpaged.config.option import (
    checked,
    option,
    option_type,
)
from jpaged.config.server_options import (
    AccessOptions,
    HttpOptions,
    KVEventsOptions,
    ServerOptions,
    TelemetryOptions,
    TimeoutOptions,
)
from jpaged.config.speculative import SpeculativeOptions

__all__ = [
    "ENVIRONMENT",
    "PROCESS_OPTIONS",
    "SECTIONS",
    "AccessOptions",
    "Backend",
    "Batching",
    "CacheOptions",
    "EngineConfig",
    "EvictionPolicyName",
    "HttpOptions",
    "KVEventsOptions",
    "KVPolicy",
    "LinearBackend",
    "LoraOptions",
    "LossyOptions",
    "ModelOptions",
    "ParallelOptions",
    "Policy",
    "PreemptionMode",
    "Role",
    "RoleOptions",
    "SchedulerOptions",
    "ServerOptions",
    "SpeculativeOptions",
    "StartupOptions",
    "TelemetryOptions",
    "TimeoutOptions",
    "api_key_from_environment",
    "checked",
    "child_environment",
    "compile_cache_dir",
    "compiler_environment_text",
    "explain_environment",
    "field_names",
    "iter_options",
    "keep_tokenizers_on_their_thread",
    "option",
    "option_type",
    "platform_default",
    "proxy_from_environment",
    "section_help",
    "server_field_names",
    "shows_traces",
    "tpu_library",
]
