"""The beginnings of a prompt as a chain of hashes of the request's bytes; nothing is tokenized here.

    prompt      bytes of it
    text        its UTF-8
    token ids   four for each
    a chat      its messages as sent, concatenated

The chain is cut at fixed positions, close together at first. The common hashes of two prompts cover their common
leading bytes. They have none in common if tenant, adapter, salt or tools differ, because they then share no blocks.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from jpaged._proto.v1 import inference_pb2

Chain = tuple[bytes, ...]

_STEPS = (64,) * 4 + (256,) * 15 + (1024,) * 28 + (4096,) * 56
CUTS = tuple(accumulate(_STEPS))
"""Cut positions of chains in bytes: from 64 to 256 KiB; bytes after that are ignored."""
DIGEST_BYTES = 8
MAX_KNOWN_PREFIXES = 1 << 17
"""Default number of hashes that a router keeps."""
_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True, eq=False)
class Beginning:
    """The part of a request that decides the placement: the beginning of the prompt, and the owner.

    Attributes:
        chain: its hashes, the shortest beginning first.
        token_ids: the prompt's token ids, up to the end of the chain; None for a text or a chat.
        salt, adapter: as in the request.
        tenant: as in its metadata.
        has_unread_key: the request has a key that the router has not checked; only servers know its tenant.
    """

    chain: Chain
    token_ids: array[int] | None = None
    salt: str = ""
    adapter: str = ""
    tenant: str = ""
    has_unread_key: bool = False

    def num_tokens(self, num_hashes: int) -> int:
        """Return the approximate number of tokens of a number of hashes, for a prompt of token ids."""
        ids = self.token_ids or ()
        return min(len(ids), CUTS[num_hashes - 1] // _TOKEN_BYTES) if num_hashes else 0


def beginning_of(request: Any, owner: bytes, tenant: str = "", *, has_unread_key: bool = False) -> Beginning | None:
    """Return the beginning of a request's prompt; None if it has none.

    Args:
        owner: identifies the owner of the request.
        tenant, has_unread_key: see `Beginning`.
    """
    if isinstance(request, inference_pb2.GenerateRequest):
        salt = request.sampling.cache_salt
    elif isinstance(request, inference_pb2.ScoreRequest):
        salt = request.cache_salt
    else:
        return None
    kind = request.WhichOneof("prompt") or ""
    tools, ids = b"", None
    if kind == "text":
        content = request.text[: CUTS[-1]].encode(errors="replace")
    elif kind == "token_ids":
        ids = array("I", request.token_ids.ids[: CUTS[-1] // _TOKEN_BYTES])
        content = _little_endian(ids)
    elif kind == "chat":
        tools = b"".join(one.SerializeToString(deterministic=True) for one in request.chat.tools)
        content = _laid_out(request.chat)
    else:
        return None
    chain = _chain(_root(owner, request.adapter, salt, kind, tools), content)
    return Beginning(chain, ids, salt, request.adapter, tenant, has_unread_key)


def beginning_of_ids(token_ids: Sequence[int], owner: bytes) -> Beginning:
    """Return the beginning of a prompt of token ids, like `beginning_of` for a request with nothing else."""
    ids = array("I", token_ids[: CUTS[-1] // _TOKEN_BYTES])
    return Beginning(_chain(_root(owner, "", "", "token_ids", b""), _little_endian(ids)), ids)


def _root(owner: bytes, adapter: str, salt: str, kind: str, tools: bytes) -> bytes:
    root = hashlib.blake2b(digest_size=16)
    for part in (owner, adapter.encode(errors="replace"), salt.encode(errors="replace"), kind.encode(), tools):
        root.update(len(part).to_bytes(8, "little") + part)
    return root.digest()


def _little_endian(ids: array[int]) -> bytes:
    if sys.byteorder == "little":
        return ids.tobytes()
    swapped = array("I", ids)
    swapped.byteswap()
    return swapped.tobytes()


def _laid_out(chat: inference_pb2.ChatPrompt) -> bytes:
    found = bytearray()
    for message in chat.messages:
        one = message.SerializeToString(deterministic=True)
        found += len(one).to_bytes(4, "little") + one
        if len(found) >= CUTS[-1]:
            break
    return bytes(found)


def _chain(root: bytes, content: bytes) -> Chain:
    made, digest, begin = [], root, 0
    for end in CUTS:
        if end > len(content):
            break
        digest = hashlib.blake2b(content[begin:end], digest_size=DIGEST_BYTES, key=digest).digest()
        made.append(digest)
        begin = end
    if not made:  # shorter than the first cut: equal only if identical
        made.append(hashlib.blake2b(content, digest_size=DIGEST_BYTES, key=root).digest())
    return tuple(made)
