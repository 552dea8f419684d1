from jpaged._proto.v1 import inference_pb2 as _inference_pb2
from jpaged._proto.v1 import prefixes_pb2 as _prefixes_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillRequest(_message.Message):
    __slots__ = ("request", "kv_identity", "adapter_digest", "cache_tenant", "num_known_blocks", "data_protocol", "block_size", "model_identity")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    KV_IDENTITY_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CACHE_TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_KNOWN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DATA_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MODEL_IDENTITY_FIELD_NUMBER: _ClassVar[int]
    request: _inference_pb2.GenerateRequest
    kv_identity: bytes
    adapter_digest: bytes
    cache_tenant: str
    num_known_blocks: int
    data_protocol: str
    block_size: int
    model_identity: bytes
    def __init__(self, request: _Optional[_Union[_inference_pb2.GenerateRequest, _Mapping]] = ..., kv_identity: _Optional[bytes] = ..., adapter_digest: _Optional[bytes] = ..., cache_tenant: _Optional[str] = ..., num_known_blocks: _Optional[int] = ..., data_protocol: _Optional[str] = ..., block_size: _Optional[int] = ..., model_identity: _Optional[bytes] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("told", "pieces", "offer")
    TOLD_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    told: _inference_pb2.GenerateResponse
    pieces: _prefixes_pb2.PrefixPieces
    offer: BlockOffer
    def __init__(self, told: _Optional[_Union[_inference_pb2.GenerateResponse, _Mapping]] = ..., pieces: _Optional[_Union[_prefixes_pb2.PrefixPieces, _Mapping]] = ..., offer: _Optional[_Union[BlockOffer, _Mapping]] = ...) -> None: ...

class BlockOffer(_message.Message):
    __slots__ = ("uuid", "address", "dtype", "block_shape", "parts", "sizes", "num_rows", "indices", "kv_groups", "last_key")
    UUID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SHAPE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    KV_GROUPS_FIELD_NUMBER: _ClassVar[int]
    LAST_KEY_FIELD_NUMBER: _ClassVar[int]
    uuid: int
    address: str
    dtype: str
    block_shape: _containers.RepeatedScalarFieldContainer[int]
    parts: _containers.RepeatedCompositeFieldContainer[BlockOfferPart]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    num_rows: _containers.RepeatedScalarFieldContainer[int]
    indices: _containers.RepeatedScalarFieldContainer[int]
    kv_groups: _containers.RepeatedScalarFieldContainer[int]
    last_key: bytes
    def __init__(self, uuid: _Optional[int] = ..., address: _Optional[str] = ..., dtype: _Optional[str] = ..., block_shape: _Optional[_Iterable[int]] = ..., parts: _Optional[_Iterable[_Union[BlockOfferPart, _Mapping]]] = ..., sizes: _Optional[_Iterable[int]] = ..., num_rows: _Optional[_Iterable[int]] = ..., indices: _Optional[_Iterable[int]] = ..., kv_groups: _Optional[_Iterable[int]] = ..., last_key: _Optional[bytes] = ...) -> None: ...

class BlockOfferPart(_message.Message):
    __slots__ = ("begin", "shape")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    begin: _containers.RepeatedScalarFieldContainer[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, begin: _Optional[_Iterable[int]] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class FinishPullRequest(_message.Message):
    __slots__ = ("uuid", "is_received")
    UUID_FIELD_NUMBER: _ClassVar[int]
    IS_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    uuid: int
    is_received: bool
    def __init__(self, uuid: _Optional[int] = ..., is_received: _Optional[bool] = ...) -> None: ...

class FinishPullResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
