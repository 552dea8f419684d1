"""Table of the servers that have a prompt's beginning cached: from KV events, or from where prompts were sent. No I/O.

    hash of a beginning -> the lives of servers that were sent a prompt with it
                           least recently used entries are evicted first, the longest beginnings first

A restarted server has a new life and an empty cache; entries of the former life no longer count.

For a prompt of token ids, a server with KV events has what the events report, plus the prompts of open calls: their
blocks are in use, or will be once computed.

The beginnings of a prompt are a chain of hashes of the request's bytes; nothing is tokenized here.

    prompt      bytes of it
    text        its UTF-8
    token ids   four for each
    a chat      its messages as sent, concatenated

The chain is cut at fixed positions, close together at first. The common hashes of two prompts cover their common
leading bytes. They have none in common if tenant, adapter, salt or tools differ, because they then share no blocks.

`ReplicaPlacement` places prompts on servers that another program knows and calls, such as Ray Serve's replicas:

order ──> the program sends it to the first that accepts it ──> sent ──> ended
          or asks again, if none does
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from jpaged._proto.v1 import inference_pb2
from jpaged.client.routing.endpoints import S, rank, within_load_margin

Chain = tuple[bytes, ...]

_STEPS = (64,) * 4 + (256,) * 15 + (1024,) * 28 + (4096,) * 56
CUTS = tuple(accumulate(_STEPS))
"""Cut positions of chains in bytes: from 64 to 256 KiB; bytes after that are ignored."""
DIGEST_BYTES = 8
MAX_KNOWN_PREFIXES = 1 << 17
"""Default number of hashes that a router keeps."""
_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True, eq=False)
class PromptPrefix:
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


def parse_prompt_prefix(
    request: Any, owner: bytes, tenant: str = "", *, has_unread_key: bool = False
) -> PromptPrefix | None:
    """Return the beginning of a request's prompt; None if it has none.

    Args:
        owner: identifies the owner of the request.
        tenant, has_unread_key: see `PromptPrefix`.
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
    elif kind == "prompt_embeds":
        content = request.prompt_embeds.values[: CUTS[-1]]
    else:
        return None
    chain = _chain(_root(owner, request.adapter, salt, kind, tools), content)
    return PromptPrefix(chain, ids, salt, request.adapter, tenant, has_unread_key)


def beginning_of_ids(token_ids: Sequence[int], owner: bytes) -> PromptPrefix:
    """Return the beginning of a prompt of token ids, like `parse_prompt_prefix` for a request with nothing else."""
    ids = array("I", token_ids[: CUTS[-1] // _TOKEN_BYTES])
    return PromptPrefix(_chain(_root(owner, "", "", "token_ids", b""), _little_endian(ids)), ids)


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


class ReportedPrefixes(Protocol):
    """Index of the prefixes that servers report by KV events."""

    def num_tokens(self, prompt: PromptPrefix) -> Mapping[str, int]:
        """Return the number of cached leading tokens per server, only for servers that report them."""


class PrefixTable:
    """Placement of a router's calls by prompt beginning.

    Args:
        max_entries: maximum number of hashes, about 200 bytes each.
        told: index of KV events; None if there is none.

    Attributes:
        num_placed: prompts placed.
        num_hits: prompts placed on a server that has their beginning.
        num_passed_over: prompts whose best server was skipped because of too much load.
    """

    def __init__(self, max_entries: int, told: ReportedPrefixes | None = None) -> None:
        self._max_entries = max_entries
        self._reported = told
        self._lives_of = OrderedDict[bytes, frozenset[int]]()
        self._life_of: dict[str, int] = {}
        self._name_of: dict[int, str] = {}
        self._open: dict[int, Counter[bytes]] = {}
        self._numbers = itertools.count()
        self.num_placed = self.num_hits = self.num_passed_over = 0

    def __len__(self) -> int:
        return len(self._lives_of)

    def begin(self, name: str) -> None:
        """Add a server, or restart it: it holds nothing yet."""
        self.end(name)
        life = next(self._numbers)
        self._life_of[name], self._name_of[life] = life, name
        self._open[life] = Counter()

    def end(self, name: str) -> None:
        """Remove a server and its entries."""
        life = self._life_of.pop(name, None)
        if life is not None:
            del self._name_of[life], self._open[life]

    def get_life(self, name: str) -> int | None:
        """Return the current life of a server; None if unknown."""
        return self._life_of.get(name)

    def place(self, key: PromptPrefix, usable: Sequence[S]) -> S:
        """Choose a server and record that the prompt is sent there. See `Placement`."""
        chosen = self.choose(key, usable)
        self.note(key, chosen.name)
        return chosen

    def choose(self, key: PromptPrefix, usable: Sequence[S]) -> S:
        """Return the server with the longest cached beginning; among equals, the least loaded.

        Ties are broken by rendezvous hashing, so that several routers without entries agree.
        """
        told = {} if self._reported is None else self._reported.num_tokens(key)
        length, holders = self._longest(key, {one.name for one in usable}, told)
        anywhere = length if len(usable) == len(self._life_of) else self._longest(key, self._life_of.keys(), told)[0]
        self.num_placed += 1
        self.num_hits += length > 0
        self.num_passed_over += anywhere > length
        among = [one for one in usable if one.name in holders] if length else usable
        least = min(one.num_busy for one in among)
        return max((one for one in among if one.num_busy == least), key=lambda one: rank(key.chain[0], one.name))

    def note(self, key: PromptPrefix, name: str) -> None:
        """Record that a server was sent this prompt. The longest beginning is entered first, and so evicted first."""
        life = self._life_of.get(name)
        if life is None:
            return
        if self._reported is not None and key.token_ids is not None:
            self._open[life].update(key.chain)
        alone, entries = frozenset((life,)), self._lives_of
        for digest in reversed(key.chain):
            held = entries.get(digest)
            if held is None:
                entries[digest] = alone
            elif life not in held:
                entries[digest] = alone.union(one for one in held if one in self._name_of)
            entries.move_to_end(digest)
        while len(entries) > self._max_entries:
            entries.popitem(last=False)

    def ended(self, key: PromptPrefix, life: int) -> None:
        """Record the end of a placed call, in the life of the server that began it."""
        calls = self._open.get(life)
        if calls is not None and key.token_ids is not None:
            for digest in key.chain:
                calls[digest] -= 1
                if calls[digest] <= 0:
                    del calls[digest]

    def _longest(self, key: PromptPrefix, names: Set[str], told: Mapping[str, int]) -> tuple[int, Set[str]]:
        """Return the length of the longest cached beginning, in hashes or tokens, and the servers that have it."""
        depth, holders = self._longest_sent(key.chain, names - told.keys())
        lengths = dict.fromkeys(holders, depth if key.token_ids is None else key.num_tokens(depth))
        for name in names & told.keys() & self._life_of.keys():
            lengths[name] = max(told[name], key.num_tokens(self._num_open(key.chain, name)))
        longest = max(lengths.values(), default=0)
        return longest, {name for name, length in lengths.items() if length == longest}

    def _longest_sent(self, chain: Chain, names: Set[str]) -> tuple[int, Set[str]]:
        """Return the maximum number of leading hashes sent to some servers, and the servers that were sent them."""
        depth, holders = 0, {life for name in names if (life := self._life_of.get(name)) is not None}
        for digest in chain:
            left = holders & self._lives_of.get(digest, frozenset())
            if not left:
                break
            depth, holders = depth + 1, left
        return depth, {self._name_of[life] for life in holders} if depth else set()

    def _num_open(self, chain: Chain, name: str) -> int:
        """Return the number of leading hashes that an open call at a server has."""
        calls = self._open[self._life_of[name]]
        return sum(1 for _ in itertools.takewhile(calls.__contains__, chain))


@dataclass(frozen=True, slots=True)
class _PlacedReplica:
    name: str
    num_busy: int


class ReplicaPlacement:
    """Placement state of one caller of several servers.

    Args:
        max_known_prefixes: maximum number of hashes of beginnings, about 200 bytes each.
    """

    def __init__(self, max_known_prefixes: int) -> None:
        self._directory = PrefixTable(max_known_prefixes)
        self._names: frozenset[str] = frozenset()
        self._num_open = Counter[str]()
        self._open = set[tuple[str, str]]()

    def update(self, names: Iterable[str]) -> None:
        """Set the available servers; a new one holds nothing."""
        there = frozenset(names)
        for name in self._names - there:
            self._directory.end(name)
            del self._num_open[name]
        self._open = {one for one in self._open if one[1] in there}
        for name in there - self._names:
            self._directory.begin(name)
        self._names = there

    def order(self, key: PromptPrefix, told_busy: Mapping[str, int]) -> list[str]:
        """Return the servers in order of preference: the longest cached beginning first, then by load.

        Args:
            key: key of the prompt's beginnings.
            told_busy: servers that may take it, with their reported number of calls from all callers.
        """
        usable = [_PlacedReplica(name, self._num_busy(name, told)) for name, told in told_busy.items()]
        if not usable:
            return []
        first = self._directory.choose(key, within_load_margin(usable))
        others = sorted((one for one in usable if one is not first), key=lambda one: (one.num_busy, one.name))
        return [first.name, *(one.name for one in others)]

    def sent(self, call: str, key: PromptPrefix | None, name: str) -> None:
        """Record that a server accepted a call; the key is None if it has no prompt."""
        if name in self._names and (call, name) not in self._open:
            self._open.add((call, name))
            self._num_open[name] += 1
            if key is not None:
                self._directory.note(key, name)

    def ended(self, call: str, name: str) -> None:
        """Record the end of a call; ignored if the server had not accepted it, or is gone."""
        if (call, name) in self._open:
            self._open.remove((call, name))
            self._num_open[name] -= 1

    def _num_busy(self, name: str, told: int) -> int:
        return max(told, self._num_open[name])
