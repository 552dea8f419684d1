import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from jpaged._proto.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ServerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVER_STATE_UNSPECIFIED: _ClassVar[ServerState]
    SERVER_STATE_STARTING: _ClassVar[ServerState]
    SERVER_STATE_SERVING: _ClassVar[ServerState]
    SERVER_STATE_DRAINING: _ClassVar[ServerState]
    SERVER_STATE_FAILED: _ClassVar[ServerState]
    SERVER_STATE_STALLED: _ClassVar[ServerState]

class UpdateMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UPDATE_MODE_UNSPECIFIED: _ClassVar[UpdateMode]
    UPDATE_MODE_KEEP: _ClassVar[UpdateMode]
    UPDATE_MODE_WAIT: _ClassVar[UpdateMode]
    UPDATE_MODE_ABORT: _ClassVar[UpdateMode]
SERVER_STATE_UNSPECIFIED: ServerState
SERVER_STATE_STARTING: ServerState
SERVER_STATE_SERVING: ServerState
SERVER_STATE_DRAINING: ServerState
SERVER_STATE_FAILED: ServerState
SERVER_STATE_STALLED: ServerState
UPDATE_MODE_UNSPECIFIED: UpdateMode
UPDATE_MODE_KEEP: UpdateMode
UPDATE_MODE_WAIT: UpdateMode
UPDATE_MODE_ABORT: UpdateMode

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("server_version", "api_version", "state", "start_time", "startup", "backend", "options", "role", "checkpoint")
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    API_VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    STARTUP_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    server_version: str
    api_version: str
    state: ServerState
    start_time: _timestamp_pb2.Timestamp
    startup: StartupProgress
    backend: Backend
    options: _containers.RepeatedCompositeFieldContainer[Option]
    role: str
    checkpoint: str
    def __init__(self, server_version: _Optional[str] = ..., api_version: _Optional[str] = ..., state: _Optional[_Union[ServerState, str]] = ..., start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., startup: _Optional[_Union[StartupProgress, _Mapping]] = ..., backend: _Optional[_Union[Backend, _Mapping]] = ..., options: _Optional[_Iterable[_Union[Option, _Mapping]]] = ..., role: _Optional[str] = ..., checkpoint: _Optional[str] = ...) -> None: ...

class StartupProgress(_message.Message):
    __slots__ = ("what", "done", "total")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    what: str
    done: int
    total: int
    def __init__(self, what: _Optional[str] = ..., done: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class Backend(_message.Message):
    __slots__ = ("platform", "device_kind", "num_devices", "attention", "jax_version")
    PLATFORM_FIELD_NUMBER: _ClassVar[int]
    DEVICE_KIND_FIELD_NUMBER: _ClassVar[int]
    NUM_DEVICES_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    JAX_VERSION_FIELD_NUMBER: _ClassVar[int]
    platform: str
    device_kind: str
    num_devices: int
    attention: str
    jax_version: str
    def __init__(self, platform: _Optional[str] = ..., device_kind: _Optional[str] = ..., num_devices: _Optional[int] = ..., attention: _Optional[str] = ..., jax_version: _Optional[str] = ...) -> None: ...

class Option(_message.Message):
    __slots__ = ("name", "value", "source")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    source: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("name", "architecture", "vocab_size", "max_model_len", "dtype", "num_layers", "num_query_heads", "num_kv_heads", "head_dim", "eos_token_ids", "has_chat_template", "max_loras", "max_lora_rank", "tool_call_parser", "reasoning_parser", "max_logprobs", "lossy_kv_window", "lossy_kv_sinks", "default_sampling", "aliases", "state_bytes_per_sequence", "weight_version", "max_images", "max_image_pixels")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUERY_HEADS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    MAX_LORAS_FIELD_NUMBER: _ClassVar[int]
    MAX_LORA_RANK_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_PARSER_FIELD_NUMBER: _ClassVar[int]
    REASONING_PARSER_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOSSY_KV_WINDOW_FIELD_NUMBER: _ClassVar[int]
    LOSSY_KV_SINKS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_PER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_IMAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_IMAGE_PIXELS_FIELD_NUMBER: _ClassVar[int]
    name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    dtype: str
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    has_chat_template: bool
    max_loras: int
    max_lora_rank: int
    tool_call_parser: str
    reasoning_parser: str
    max_logprobs: int
    lossy_kv_window: int
    lossy_kv_sinks: int
    default_sampling: _inference_pb2.SamplingParams
    aliases: _containers.RepeatedScalarFieldContainer[str]
    state_bytes_per_sequence: int
    weight_version: str
    max_images: int
    max_image_pixels: int
    def __init__(self, name: _Optional[str] = ..., architecture: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., dtype: _Optional[str] = ..., num_layers: _Optional[int] = ..., num_query_heads: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., has_chat_template: _Optional[bool] = ..., max_loras: _Optional[int] = ..., max_lora_rank: _Optional[int] = ..., tool_call_parser: _Optional[str] = ..., reasoning_parser: _Optional[str] = ..., max_logprobs: _Optional[int] = ..., lossy_kv_window: _Optional[int] = ..., lossy_kv_sinks: _Optional[int] = ..., default_sampling: _Optional[_Union[_inference_pb2.SamplingParams, _Mapping]] = ..., aliases: _Optional[_Iterable[str]] = ..., state_bytes_per_sequence: _Optional[int] = ..., weight_version: _Optional[str] = ..., max_images: _Optional[int] = ..., max_image_pixels: _Optional[int] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("num_running", "num_waiting", "max_num_seqs", "num_blocks", "num_blocks_free", "num_blocks_used", "peak_blocks_used", "slot_use", "num_steps", "num_preemptions", "num_prompt_tokens", "num_generation_tokens", "num_compiles_after_warm_up", "num_swapped", "num_blocks_cached", "num_copies_on_write", "num_blocks_swapped_out", "num_blocks_swapped_in", "num_recomputed_tokens", "num_prefix_query_tokens", "num_prefix_hit_tokens", "num_cascade_steps", "num_cascade_tokens", "replicas", "num_nonfinite_requests", "num_host_hit_tokens", "num_disk_hit_tokens", "num_disk_blocks", "disk_bytes_read", "disk_bytes_written", "num_disk_blocks_dropped")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    PEAK_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    SLOT_USE_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPILES_AFTER_WARM_UP_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPPED_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    NUM_COPIES_ON_WRITE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_SWAPPED_OUT_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_SWAPPED_IN_FIELD_NUMBER: _ClassVar[int]
    NUM_RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CASCADE_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_CASCADE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    NUM_NONFINITE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_READ_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_BLOCKS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    max_num_seqs: int
    num_blocks: int
    num_blocks_free: int
    num_blocks_used: int
    peak_blocks_used: int
    slot_use: float
    num_steps: int
    num_preemptions: int
    num_prompt_tokens: int
    num_generation_tokens: int
    num_compiles_after_warm_up: int
    num_swapped: int
    num_blocks_cached: int
    num_copies_on_write: int
    num_blocks_swapped_out: int
    num_blocks_swapped_in: int
    num_recomputed_tokens: int
    num_prefix_query_tokens: int
    num_prefix_hit_tokens: int
    num_cascade_steps: int
    num_cascade_tokens: int
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaLoad]
    num_nonfinite_requests: int
    num_host_hit_tokens: int
    num_disk_hit_tokens: int
    num_disk_blocks: int
    disk_bytes_read: int
    disk_bytes_written: int
    num_disk_blocks_dropped: int
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_blocks_free: _Optional[int] = ..., num_blocks_used: _Optional[int] = ..., peak_blocks_used: _Optional[int] = ..., slot_use: _Optional[float] = ..., num_steps: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_generation_tokens: _Optional[int] = ..., num_compiles_after_warm_up: _Optional[int] = ..., num_swapped: _Optional[int] = ..., num_blocks_cached: _Optional[int] = ..., num_copies_on_write: _Optional[int] = ..., num_blocks_swapped_out: _Optional[int] = ..., num_blocks_swapped_in: _Optional[int] = ..., num_recomputed_tokens: _Optional[int] = ..., num_prefix_query_tokens: _Optional[int] = ..., num_prefix_hit_tokens: _Optional[int] = ..., num_cascade_steps: _Optional[int] = ..., num_cascade_tokens: _Optional[int] = ..., replicas: _Optional[_Iterable[_Union[ReplicaLoad, _Mapping]]] = ..., num_nonfinite_requests: _Optional[int] = ..., num_host_hit_tokens: _Optional[int] = ..., num_disk_hit_tokens: _Optional[int] = ..., num_disk_blocks: _Optional[int] = ..., disk_bytes_read: _Optional[int] = ..., disk_bytes_written: _Optional[int] = ..., num_disk_blocks_dropped: _Optional[int] = ...) -> None: ...

class ReplicaLoad(_message.Message):
    __slots__ = ("num_running", "num_waiting", "num_blocks", "num_blocks_free", "num_blocks_used", "num_blocks_cached", "num_prefix_query_tokens", "num_prefix_hit_tokens", "num_prompt_tokens", "num_generation_tokens")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    num_blocks: int
    num_blocks_free: int
    num_blocks_used: int
    num_blocks_cached: int
    num_prefix_query_tokens: int
    num_prefix_hit_tokens: int
    num_prompt_tokens: int
    num_generation_tokens: int
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_blocks_free: _Optional[int] = ..., num_blocks_used: _Optional[int] = ..., num_blocks_cached: _Optional[int] = ..., num_prefix_query_tokens: _Optional[int] = ..., num_prefix_hit_tokens: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_generation_tokens: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PinPrefixRequest(_message.Message):
    __slots__ = ("name", "text", "token_ids", "cache_salt", "adapter")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    name: str
    text: str
    token_ids: _inference_pb2.TokenIds
    cache_salt: str
    adapter: str
    def __init__(self, name: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[_inference_pb2.TokenIds, _Mapping]] = ..., cache_salt: _Optional[str] = ..., adapter: _Optional[str] = ...) -> None: ...

class PinPrefixResponse(_message.Message):
    __slots__ = ("num_pinned_tokens",)
    NUM_PINNED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_pinned_tokens: int
    def __init__(self, num_pinned_tokens: _Optional[int] = ...) -> None: ...

class UnpinPrefixRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnpinPrefixResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("num_bytes",)
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    def __init__(self, num_bytes: _Optional[int] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SendWeightsRequest(_message.Message):
    __slots__ = ("upload", "offset", "data")
    UPLOAD_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    upload: str
    offset: int
    data: bytes
    def __init__(self, upload: _Optional[str] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class SendWeightsResponse(_message.Message):
    __slots__ = ("num_bytes",)
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    def __init__(self, num_bytes: _Optional[int] = ...) -> None: ...

class UpdateWeightsRequest(_message.Message):
    __slots__ = ("path", "mode", "version", "upload")
    PATH_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_FIELD_NUMBER: _ClassVar[int]
    path: str
    mode: UpdateMode
    version: str
    upload: str
    def __init__(self, path: _Optional[str] = ..., mode: _Optional[_Union[UpdateMode, str]] = ..., version: _Optional[str] = ..., upload: _Optional[str] = ...) -> None: ...

class UpdateWeightsResponse(_message.Message):
    __slots__ = ("weight_version",)
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    weight_version: str
    def __init__(self, weight_version: _Optional[str] = ...) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    def __init__(self, adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "path", "num_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    num_bytes: int
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., num_bytes: _Optional[int] = ...) -> None: ...
