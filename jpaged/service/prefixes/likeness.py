"""Everything that the bytes of a KV block depend on: sent with an exported prefix, checked on import."""

from __future__ import annotations

from jpaged.engine.kv.tiers.leaving import Chain, Leaving
from jpaged.errors import Incompatible, InvalidArgument
from jpaged.service.loaded_model import LoadedModel
from jpaged.service.prefixes.parts import Header


def facts_of(model: LoadedModel) -> tuple[tuple[str, str], ...]:
    """Return readable (name, value) pairs of everything that the bytes of a block depend on."""
    backend, travels = model.backend, model.engine.travels
    facts = {
        "model": model.model.architecture,
        "layers": model.model.num_layers,
        "key/value heads": model.model.num_kv_heads,
        "head dimension": model.model.head_dim,
        "dtype": model.model.dtype,
        "kv_cache_dtype": model.config.cache.kv_cache_dtype,
        "lossy_kv_window": model.model.lossy_kv_window,
        "lossy_kv_sinks": model.model.lossy_kv_sinks,
        "block_size": travels.block_size,
        "bytes of a block": travels.bytes_per_block,
        "KV groups": travels.num_kv_groups,
        "device": f"{backend.platform} {backend.device_kind}",
        "attention": backend.attention,
        "tensor_parallel_size": model.config.parallel.tensor_parallel_size,
        "context_parallel_size": model.config.parallel.context_parallel_size,
        "jax": backend.jax_version,
    }
    return tuple((name, str(value)) for name, value in facts.items())


def header_of(
    model: LoadedModel,
    cache_salt: str,
    adapter_name: str,
    chain: Chain,
    leaving: Leaving,
    num_found: int,
    identity: bytes,
) -> Header:
    """Return the header of an exported prefix, of which `num_found` blocks were found."""
    travels, adapter = model.engine.travels, model.adapters.named(adapter_name)
    size = travels.block_size
    return Header(
        kv_identity=identity,
        facts=facts_of(model),
        block_size=size,
        bytes_per_block=travels.bytes_per_block,
        num_kv_groups=travels.num_kv_groups,
        token_ids=chain.token_ids[: leaving.num_blocks * size],
        num_found_tokens=num_found * size,
        num_blocks=len(leaving.places),
        cache_salt=cache_salt,
        adapter=adapter_name,
        adapter_digest=b"" if adapter is None else adapter.matrices.digest,
    )


def require_alike(model: LoadedModel, header: Header, chain: Chain, identity: bytes) -> None:
    """Reject a prefix whose blocks are incompatible with this server's, or a header that contradicts itself."""
    if header.kv_identity != identity:
        here, there = dict(facts_of(model)), dict(header.facts)
        differing = [name for name in here if there.get(name, here[name]) != here[name]]
        told = [f"{name} is {there[name][:128]!r} there and {here[name]!r} here" for name in differing]
        why = "; ".join(told) or "the weights, the scales of the KV cache, or the kernels that computed it"
        raise Incompatible(f"the blocks of the prefix are incompatible with this server: {why}")
    adapter, travels = model.adapters.named(header.adapter), model.engine.travels
    if header.adapter_digest != (b"" if adapter is None else adapter.matrices.digest):
        raise Incompatible(f"adapter: {header.adapter!r} differs here from the adapter of the prefix")
    sizes = header.block_size, header.bytes_per_block, header.num_kv_groups
    if sizes != (travels.block_size, travels.bytes_per_block, travels.num_kv_groups):
        raise InvalidArgument("header", f"sizes {sizes} contradict its kv_identity")
    if len(chain.token_ids) != len(header.token_ids):
        most = len(chain.token_ids)
        raise InvalidArgument(
            "header.token_ids", f"{len(header.token_ids)} tokens; only {most} of them fill blocks that can be cached"
        )
    if header.num_blocks > len(chain.keys) * header.num_kv_groups:
        raise InvalidArgument("header.num_blocks", f"{header.num_blocks} blocks are more than the tokens have")
