"""A disk that is slow, or does not answer: nobody waits for it longer than it is worth, and nothing ends with it."""

from jpaged.engine.kv_cache.offload import connector_tier
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
        second.submit(name, prompt)
        second.step(2)
        assert second.queues.pending_fetch
        second.h.clock.advance(1000.0)
        second.step(40)
        assert second.h.ended(name)
    assert second.load().num_disk_fallbacks == 2
    assert second.disk._reader._bytes_per_s == 200e6 / 4  # so that before long nobody waits at all
    second.readers.release()
    second.kill()


def test_a_disk_that_was_slow_is_tried_again(tmp_path):
    texts = [[(7 * i + j) % 60 for j in range(8)] for i in range(60)]
    first = Server(tmp_path, sizes={"num_blocks": 256})
    for i, text in enumerate(texts):
        first.ask(f"{i}", text, max_tokens=1)
    first.kill()
    second = Server(tmp_path, sizes={"num_blocks": 256})
    worth = 1 * second.store.bytes_per_block / 4.0  # a block of four tokens, at a second each
    second.disk._reader._bytes_per_s = worth / 2
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
