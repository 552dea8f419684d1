"""What the full blocks of a prompt are known by: the keys of the prefix cache, the same on every server."""

from __future__ import annotations

from dataclasses import dataclass

from jpaged.engine.executor import Geometry
from jpaged.engine.kv.blocks import Key, block_key, root_key
from jpaged.engine.kv.prefix_cache import keys_seen
from jpaged.engine.kv.prefixes import Prefixes
from jpaged.types import Request


@dataclass(frozen=True, slots=True)
class PromptKeys:
    """What the full blocks of a prompt are known by.

    Attributes:
        known: of leading blocks that are here, and of what is seen from behind them.
        num_known: how many blocks those are of one KV group.
        wanted: those that are not, of what is seen from behind the prompt; of every KV group.
    """

    known: tuple[Key, ...]
    num_known: int
    wanted: tuple[Key, ...]


def prompt_keys(request: Request, prefixes: Prefixes, geometry: Geometry) -> PromptKeys:
    """Look for the blocks of a prompt, on any thread."""
    size, ids = geometry.block_size, request.prompt_token_ids
    key = root_key(request.sampling.cache_salt, request.cache_tenant, request.adapter_digest)
    chain, num_known = list[Key](), 0
    for i in range(prefixes.num_cacheable_blocks(len(ids))):
        key = block_key(key, ids[i * size : (i + 1) * size])
        chain.append(key)
        if num_known == i and prefixes.has_prefix(key):
            num_known = i + 1
    seen = keys_seen(chain, len(chain), geometry.reaches)
    are_here = [prefixes.has_prefix(key) for key in seen]
    return PromptKeys(
        tuple(key for key, is_here in zip(seen, are_here, strict=True) if is_here),
        num_known,
        tuple(key for key, is_here in zip(seen, are_here, strict=True) if not is_here),
    )
