"""The beginnings of a prompt as a chain of hashes, made of what was sent: nothing is tokenised here.

    what        bytes of it
    text        its UTF-8
    token ids   four for each
    a chat      its messages as they were sent, one behind the other

The chain is cut at fixed places, close together at first. Two prompts have as many hashes alike as they begin alike;
and none, where tenant, adapter, salt or tools are others, for then they share no blocks.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from itertools import accumulate
from typing import Any

from jpaged._proto.v1 import inference_pb2

Chain = tuple[bytes, ...]

_STEPS = (64,) * 4 + (256,) * 15 + (1024,) * 28 + (4096,) * 56
CUTS = tuple(accumulate(_STEPS))
"""Where chains are cut, in bytes: at 64 first, at 256 KiB last; what comes behind that is not looked at."""
DIGEST_BYTES = 8


def chain_of(request: Any, owner: bytes) -> Chain | None:
    """Return the hashes of a request's beginnings, the shortest first; None where it has no prompt.

    Args:
        owner: whose request it is.
    """
    if isinstance(request, inference_pb2.GenerateRequest):
        salt = request.sampling.cache_salt
    elif isinstance(request, inference_pb2.ScoreRequest):
        salt = request.cache_salt
    else:
        return None
    kind = request.WhichOneof("prompt") or ""
    tools = b""
    if kind == "text":
        content = request.text[: CUTS[-1]].encode(errors="replace")
    elif kind == "token_ids":
        ids = array("I", request.token_ids.ids[: CUTS[-1] // 4])
        if sys.byteorder == "big":
            ids.byteswap()
        content = ids.tobytes()
    elif kind == "chat":
        tools = b"".join(one.SerializeToString(deterministic=True) for one in request.chat.tools)
        content = _laid_out(request.chat)
    else:
        return None
    root = hashlib.blake2b(digest_size=16)
    for part in (owner, request.adapter.encode(errors="replace"), salt.encode(errors="replace"), kind.encode(), tools):
        root.update(len(part).to_bytes(8, "little") + part)
    return _chain(root.digest(), content)


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
    if not made:  # shorter than the first cut: alike only where it is the same
        made.append(hashlib.blake2b(content, digest_size=DIGEST_BYTES, key=root).digest())
    return tuple(made)
