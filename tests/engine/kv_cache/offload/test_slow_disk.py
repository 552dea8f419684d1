"""A disk that is slow, or does not answer: nobody waits for it longer than it is worth, and nothing ends with it."""

from types import SimpleNamespace
from typing import Any

import pytest

from jpaged.engine import core
from jpaged.engine.executor import DeviceRates
from jpaged.engine.kv_cache.connector import PrefillRate, TransferRate
from jpaged.engine.kv_cache.offload import connector_tier
from jpaged.engine.observers import StepTiming
from jpaged.engine.scheduler.output import SchedulerOutput
from tests.engine.kv_cache.offload.disks import PROMPT, Server, second_life


def test_where_reads_hang_nobody_waits_longer_than_computing_takes(tmp_path):
    """Hung reads keep all blocks that others would pass through."""
    other = [50 - i for i in range(24)]
    first = Server(tmp_path)
    first.ask("a", PROMPT)
    first.ask("b", other)
    first.kill()
    second = Server(tmp_path)
    second.readers.hold()
    for name, prompt in (("a", PROMPT), ("b", other)):
        second.disk._reader.rate = TransferRate(200e6, 0.002)  # as if no read had been late
        second.submit(name, prompt)
        second.step(2)
        assert second.queues.pending_fetch
        second.h.clock.advance(1000.0)
        second.step(40)
        assert second.h.ended(name)
    assert second.load().num_disk_fallbacks == 2
    num_bytes = 7 * second.store.bytes_per_block
    assert second.disk._reader.rate.seconds(num_bytes) > 10.0  # so that before long nobody waits at all
    second.readers.release()
    second.kill()


def test_a_disk_that_was_slow_is_tried_again(tmp_path):
    texts = [[(7 * i + j) % 60 for j in range(8)] for i in range(60)]
    first = Server(tmp_path, sizes={"num_blocks": 256})
    for i, text in enumerate(texts):
        first.ask(f"{i}", text, max_tokens=1)
    first.kill()
    second = Server(tmp_path, sizes={"num_blocks": 256})
    rate, num_bytes = second.disk._reader.rate, second.store.bytes_per_block
    for _ in range(20):
        rate.record(num_bytes, 2 * 4.0)  # a block of four tokens, at a second each
    found = [second.ask(f"{i}", text, max_tokens=1) for i, text in enumerate(texts)]
    assert not any(found[:10]) and found[-1] == 4
    second.kill()


def test_uses_that_are_to_be_noted_do_not_pile_up_where_a_write_hangs(tmp_path):
    server = second_life(tmp_path)
    server.ask("a", PROMPT)
    server.writers.hold()
    for i in range(5):
        server.ask(f"{i}", PROMPT, max_tokens=1)
    assert len(server.writers.held) == 1
    server.writers.release()
    server.step(2)
    server.kill()


def test_a_read_that_hangs_does_not_hold_up_the_end(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(connector_tier, "_END_S", 0.0)
    server = second_life(tmp_path)
    server.readers.hold()
    server.submit("a", PROMPT)
    server.step(2)
    server.stop()
    assert "did not return" in caplog.text
    assert server.store.is_on  # what hangs may still go on: its file is not closed
    server.readers.release()
    server.kill()


def test_a_read_for_another_server_that_hangs_does_not_hold_up_the_end(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(connector_tier, "_END_S", 0.0)
    server = second_life(tmp_path)
    key = next(iter(server.store._slots.known))
    server.readers.hold()
    reading = server.disk.load_block(key, memoryview(bytearray(server.store.bytes_per_block)))
    server.stop()
    assert "abandoned 1 calls that did not return" in caplog.text
    server.readers.release()
    assert reading.result() and server.store.is_on  # its file was not closed
    server.kill()


def test_the_time_of_a_transfer_has_a_constant_and_a_rate():
    rate = TransferRate(100e6, 0.001)
    assert rate.latency_s == pytest.approx(0.001) and rate.bytes_per_s == pytest.approx(100e6)
    for _ in range(30):
        rate.record(1 << 20, 0.02 + (1 << 20) / 10e6)
        rate.record(8 << 20, 0.02 + (8 << 20) / 10e6)
    assert rate.latency_s == pytest.approx(0.02, rel=0.01) and rate.bytes_per_s == pytest.approx(10e6, rel=0.01)
    assert rate.seconds(4 << 20) == pytest.approx(0.02 + (4 << 20) / 10e6, rel=0.01)


@pytest.mark.parametrize("points", [[(1000, 0.5)], [(1000, 0.5), (1000, 0.1)], [(1000, 0.5), (100000, 0.001)]])
def test_no_measurements_give_a_negative_time(points):
    rate = TransferRate(100e6, 0.001)
    for point in points * 3:
        rate.record(*point)
        assert rate.latency_s >= 0 and rate.bytes_per_s > 0 and rate.seconds(1000) > 0.005


def test_what_is_not_measured_again_is_believed_less_and_less():
    rate = TransferRate(100e6, 0.001)
    before = rate.seconds(1 << 20)
    rate.record(1 << 20, 10 * before)
    slow = rate.seconds(1 << 20)
    rate.speed_up(1 << 20)
    assert rate.seconds(1 << 20) == pytest.approx(slow / 1.02)
    for _ in range(200):
        rate.speed_up(1 << 20)
    assert rate.seconds(1 << 20) == pytest.approx(before)  # never less than assumed


def test_the_time_to_compute_follows_the_measured_steps():
    rate = PrefillRate(DeviceRates(1e9, 1e9, ((16, 0.001), (64, 0.002))))
    assert rate.seconds(0, 128) == pytest.approx(0.004)
    rate.record(1, 16, 1, 5.0)  # a decoding row
    rate.record(40, 64, 4, 5.0)  # several steps
    assert rate.seconds(0, 128) == pytest.approx(0.004)
    for _ in range(30):
        rate.record(40, 64, 1, 0.006)
    assert rate.seconds(0, 128) == pytest.approx(0.012, rel=0.01)


def test_steps_of_many_decoding_rows_do_not_count_as_prompts():
    nothing: Any = None
    rate = PrefillRate(DeviceRates(1e9, 1e9, ((16, 0.001), (64, 0.002))))
    timing = StepTiming(nothing, num_tokens=32, num_padded=64, num_steps=1, begin_s=0.0, end_s=5.0, seconds=5.0)
    before, scheduled = rate.seconds(0, 16), SchedulerOutput(num_tokens=32)
    row: Any = SimpleNamespace(num_tokens=1)
    chunk: Any = SimpleNamespace(num_tokens=31)
    scheduled.rows = [row] * 32
    core._record_prefill(rate, scheduled, nothing, timing)
    assert rate.seconds(0, 16) == before
    scheduled.rows = [row, chunk]
    core._record_prefill(rate, scheduled, nothing, timing)
    assert rate.seconds(0, 16) > before


def test_blocks_are_loaded_again_once_computing_them_has_become_slow(tmp_path):
    second = second_life(tmp_path)
    reader = second.disk._reader
    for _ in range(8):
        reader.rate.record(7 * second.store.bytes_per_block, 40.0)  # computing 28 tokens takes 28 s
    assert not reader.is_worth(0, 7, 7)
    for _ in range(10):
        second.disk.prefill.record(16, 16, 1, 50.0)
    assert reader.is_worth(0, 7, 7)
    second.kill()
