"""A server tells over its sockets which prefixes it holds."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from jpaged.build import build
from jpaged.config import EngineConfig
from jpaged.errors import InvalidArgument
from jpaged.kvevents.directory import Directory
from jpaged.kvevents.subscriber import Subscriber
from jpaged.types import OutputEvent, Request, SamplingParams

OPTIONS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_blocks": 64}
PROMPT = tuple(range(300, 400))
_PATIENCE_S = 120.0


@pytest.mark.long
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_router_knows_what_each_replica_holds(tmp_path: Path, num_replicas: int) -> None:
    """Every replica has addresses of its own; together they hold the prompt once."""
    addresses = {"kv_events_endpoint": f"ipc://{tmp_path}/e", "kv_events_replay_endpoint": f"ipc://{tmp_path}/r"}
    loaded = build(EngineConfig.load({**OPTIONS, **addresses, "data_parallel_size": num_replicas}))
    directory, changed = Directory(), threading.Condition()

    def reader_of(rank: int) -> Subscriber:
        def take(events: Any) -> None:
            with changed:
                directory.take(str(rank), events)
                changed.notify_all()

        end = f"_dp{rank}" if rank else ""
        return Subscriber(f"ipc://{tmp_path}/e{end}", take, replay_endpoint=f"ipc://{tmp_path}/r{end}")

    readers = [reader_of(rank) for rank in range(num_replicas)]
    loaded.engine.start()
    try:
        ended = threading.Event()

        def sink(event: OutputEvent) -> None:
            if event.is_last:
                ended.set()

        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        loaded.engine.submit(Request("a", PROMPT, sampling), sink)
        assert ended.wait(_PATIENCE_S)
        num_full = len(PROMPT) // loaded.engine.geometry.block_size * loaded.engine.geometry.block_size
        with changed:
            assert changed.wait_for(lambda: [*directory.num_tokens_held(PROMPT).values()] == [num_full], _PATIENCE_S)
        loaded.engine.reset_prefix_cache().result(_PATIENCE_S)
        with changed:
            assert changed.wait_for(lambda: not directory.num_tokens_held(PROMPT), _PATIENCE_S)
    finally:
        loaded.engine.stop()
        for reader in readers:
            reader.close()


@pytest.mark.parametrize("given", [{"enable_prefix_caching": False}, {"kv_policy": "reserve-max"}], ids=str)
def test_events_of_what_is_not_cached_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="kv_events_endpoint: there are no events to publish"):
        EngineConfig.load({"kv_events_endpoint": "tcp://*:5557", **given})


@pytest.mark.long
def test_a_lossy_server_tells_of_its_first_tokens(tmp_path: Path) -> None:
    lossy = {"lossy_kv_window": 32, "lossy_kv_sinks": 5}
    loaded = build(EngineConfig.load({**OPTIONS, **lossy, "kv_events_endpoint": f"ipc://{tmp_path}/e"}))
    try:
        engine: Any = loaded.engine
        encoder = engine.prefixes.changes._sink._encoder
        assert (encoder.windows, encoder.num_sink_tokens) == ((32,), 5)
    finally:
        loaded.engine.stop()
