from jpaged._proto.v1 import inference_pb2 as _inference_pb2
from jpaged._proto.v1 import prefixes_pb2 as _prefixes_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
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
    __slots__ = ("told", "pieces")
    TOLD_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    told: _inference_pb2.GenerateResponse
    pieces: _prefixes_pb2.PrefixPieces
    def __init__(self, told: _Optional[_Union[_inference_pb2.GenerateResponse, _Mapping]] = ..., pieces: _Optional[_Union[_prefixes_pb2.PrefixPieces, _Mapping]] = ...) -> None: ...
