from jpaged._proto.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillRequest(_message.Message):
    __slots__ = ("request", "kv_identity", "adapter_digest", "cache_tenant", "num_known_blocks")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    KV_IDENTITY_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CACHE_TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_KNOWN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    request: _inference_pb2.GenerateRequest
    kv_identity: bytes
    adapter_digest: bytes
    cache_tenant: str
    num_known_blocks: int
    def __init__(self, request: _Optional[_Union[_inference_pb2.GenerateRequest, _Mapping]] = ..., kv_identity: _Optional[bytes] = ..., adapter_digest: _Optional[bytes] = ..., cache_tenant: _Optional[str] = ..., num_known_blocks: _Optional[int] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("told", "blocks")
    TOLD_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    told: _inference_pb2.GenerateResponse
    blocks: PromptBlocks
    def __init__(self, told: _Optional[_Union[_inference_pb2.GenerateResponse, _Mapping]] = ..., blocks: _Optional[_Union[PromptBlocks, _Mapping]] = ...) -> None: ...

class PromptBlocks(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[PromptBlock]
    def __init__(self, blocks: _Optional[_Iterable[_Union[PromptBlock, _Mapping]]] = ...) -> None: ...

class PromptBlock(_message.Message):
    __slots__ = ("key", "contents", "digest")
    KEY_FIELD_NUMBER: _ClassVar[int]
    CONTENTS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    contents: bytes
    digest: bytes
    def __init__(self, key: _Optional[bytes] = ..., contents: _Optional[bytes] = ..., digest: _Optional[bytes] = ...) -> None: ...
