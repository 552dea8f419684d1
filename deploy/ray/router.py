"""Which replica a call goes to: the one that was sent the longest beginning of its prompt, unless others are less busy.

    RequestRouterConfig(request_router_class=PrefixRouter, request_router_kwargs={"max_known_prefixes": 131072})

It runs in Ray's proxies, each of which knows what it sent itself, and goes there as a value: it may import what is
installed, and nothing that lies beside it. The rule is that of `jpaged route` (docs/route.md).
"""

from __future__ import annotations

import pickle
import random
from collections import OrderedDict
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from jpaged.route.methods import get_owner
from jpaged.route.prefix_table import PromptPrefix, ReplicaPlacement, parse_prompt_prefix

MAX_KEPT_KEYS = 8192
"""Calls that wait for a replica, and of which the beginnings are kept; of one more they are made again."""


class PrefixRouter(RequestRouter):
    """Ray's interface over `ReplicaPlacement`."""

    def initialize_state(self, max_known_prefixes: int) -> None:
        """Ray calls it once, with `request_router_kwargs`.

        Args:
            max_known_prefixes: hashes of beginnings that are kept, about 200 bytes each.
        """
        self._known = ReplicaPlacement(max_known_prefixes)
        self._keys = OrderedDict[str, PromptPrefix | None]()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Ray tells which there are."""
        self._known.update(replica.replica_id.unique_id for replica in replicas)
        super().update_replicas(replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas in the order in which Ray asks whether they have room; of a rank it asks the least busy."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # else Ray asks full ones again and again
            key = self._key(pending_request)
            if key is not None:
                found = {one.replica_id.unique_id: one for one in candidate_replicas}
                told = {name: self.replica_queue_len_cache.get(one.replica_id) or 0 for name, one in found.items()}
                return [[found[name]] for name in self._known.order(key, told)]
        return [random.sample(candidate_replicas, len(candidate_replicas))]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """Ray has sent it there."""
        call, key = pending_request.metadata.internal_request_id, self._key(pending_request)
        self._keys.pop(call, None)
        self._known.sent(call, key, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """It has ended; Ray says so of calls, too, that a replica had no room for."""
        self._known.ended(internal_request_id, replica_id.unique_id)

    def _key(self, pending_request: PendingRequest) -> PromptPrefix | None:
        """A request's beginnings; a call waits here for as long as replicas are full, and is asked about again."""
        name = pending_request.metadata.internal_request_id
        if name not in self._keys:
            self._keys[name] = get_key(pending_request)
            if len(self._keys) > MAX_KEPT_KEYS:
                self._keys.popitem(last=False)
        return self._keys[name]


def get_key(pending_request: PendingRequest) -> PromptPrefix | None:
    """The beginnings of the prompt of a call that came over gRPC; None where it has none."""
    metadata = pending_request.metadata
    if not metadata.is_grpc_request or not isinstance(pending_request.args[0], bytes):
        return None
    sent: Any = pickle.loads(pending_request.args[0])  # of the proxy's own making, in this process
    context = metadata.grpc_context
    owner = b"" if context is None else get_owner(tuple(context.invocation_metadata()))
    found = parse_prompt_prefix(getattr(sent, "user_request_proto", None), owner)
    return None if found is None else PromptPrefix(found.chain)  # its tokens are for who hears what servers hold
