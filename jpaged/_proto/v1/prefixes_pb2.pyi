from jpaged._proto.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SavePrefixRequest(_message.Message):
    __slots__ = ("text", "token_ids", "cache_salt", "adapter", "num_known_tokens")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    NUM_KNOWN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _inference_pb2.TokenIds
    cache_salt: str
    adapter: str
    num_known_tokens: int
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[_inference_pb2.TokenIds, _Mapping]] = ..., cache_salt: _Optional[str] = ..., adapter: _Optional[str] = ..., num_known_tokens: _Optional[int] = ...) -> None: ...

class SavePrefixResponse(_message.Message):
    __slots__ = ("header", "pieces")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    header: PrefixHeader
    pieces: PrefixPieces
    def __init__(self, header: _Optional[_Union[PrefixHeader, _Mapping]] = ..., pieces: _Optional[_Union[PrefixPieces, _Mapping]] = ...) -> None: ...

class LoadPrefixRequest(_message.Message):
    __slots__ = ("header", "pieces")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    header: PrefixHeader
    pieces: PrefixPieces
    def __init__(self, header: _Optional[_Union[PrefixHeader, _Mapping]] = ..., pieces: _Optional[_Union[PrefixPieces, _Mapping]] = ...) -> None: ...

class LoadPrefixResponse(_message.Message):
    __slots__ = ("arrival",)
    ARRIVAL_FIELD_NUMBER: _ClassVar[int]
    arrival: PrefixArrival
    def __init__(self, arrival: _Optional[_Union[PrefixArrival, _Mapping]] = ...) -> None: ...

class FetchPrefixRequest(_message.Message):
    __slots__ = ("source", "text", "token_ids", "cache_salt", "adapter")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    source: str
    text: str
    token_ids: _inference_pb2.TokenIds
    cache_salt: str
    adapter: str
    def __init__(self, source: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[_inference_pb2.TokenIds, _Mapping]] = ..., cache_salt: _Optional[str] = ..., adapter: _Optional[str] = ...) -> None: ...

class FetchPrefixResponse(_message.Message):
    __slots__ = ("arrival",)
    ARRIVAL_FIELD_NUMBER: _ClassVar[int]
    arrival: PrefixArrival
    def __init__(self, arrival: _Optional[_Union[PrefixArrival, _Mapping]] = ...) -> None: ...

class PrefixHeader(_message.Message):
    __slots__ = ("kv_identity", "facts", "block_size", "bytes_per_block", "num_kv_groups", "token_ids", "num_found_tokens", "num_blocks", "cache_salt", "adapter", "adapter_digest")
    KV_IDENTITY_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_GROUPS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_FOUND_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    kv_identity: bytes
    facts: _containers.RepeatedCompositeFieldContainer[KvFact]
    block_size: int
    bytes_per_block: int
    num_kv_groups: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_found_tokens: int
    num_blocks: int
    cache_salt: str
    adapter: str
    adapter_digest: bytes
    def __init__(self, kv_identity: _Optional[bytes] = ..., facts: _Optional[_Iterable[_Union[KvFact, _Mapping]]] = ..., block_size: _Optional[int] = ..., bytes_per_block: _Optional[int] = ..., num_kv_groups: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_found_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., cache_salt: _Optional[str] = ..., adapter: _Optional[str] = ..., adapter_digest: _Optional[bytes] = ...) -> None: ...

class KvFact(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class PrefixPieces(_message.Message):
    __slots__ = ("pieces",)
    PIECES_FIELD_NUMBER: _ClassVar[int]
    pieces: _containers.RepeatedCompositeFieldContainer[PrefixPiece]
    def __init__(self, pieces: _Optional[_Iterable[_Union[PrefixPiece, _Mapping]]] = ...) -> None: ...

class PrefixPiece(_message.Message):
    __slots__ = ("index", "kv_group", "offset", "contents", "key", "hash")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    KV_GROUP_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CONTENTS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    index: int
    kv_group: int
    offset: int
    contents: bytes
    key: bytes
    hash: bytes
    def __init__(self, index: _Optional[int] = ..., kv_group: _Optional[int] = ..., offset: _Optional[int] = ..., contents: _Optional[bytes] = ..., key: _Optional[bytes] = ..., hash: _Optional[bytes] = ...) -> None: ...

class PrefixArrival(_message.Message):
    __slots__ = ("num_tokens", "num_found_tokens", "num_loaded_blocks", "num_known_blocks", "is_short_of_room")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FOUND_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOADED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_KNOWN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IS_SHORT_OF_ROOM_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    num_found_tokens: int
    num_loaded_blocks: int
    num_known_blocks: int
    is_short_of_room: bool
    def __init__(self, num_tokens: _Optional[int] = ..., num_found_tokens: _Optional[int] = ..., num_loaded_blocks: _Optional[int] = ..., num_known_blocks: _Optional[int] = ..., is_short_of_room: _Optional[bool] = ...) -> None: ...
