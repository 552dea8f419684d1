"""Threads for a disk: what they are given is done or cancelled, and what hangs is waited for by nobody."""

import threading
from concurrent.futures import wait

import pytest

from jpaged.engine.kv_cache.connector import DaemonThreadPool


def test_what_is_asked_for_is_done_and_errors_are_who_asks():
    threads = DaemonThreadPool(2, "test")
    futures = [threads.submit(divmod, number, 3) for number in range(20)]
    assert [future.result(60) for future in futures] == [divmod(number, 3) for number in range(20)]
    with pytest.raises(ZeroDivisionError):
        threads.submit(divmod, 1, 0).result(60)
    assert threads.submit(max, 1, 2, key=lambda number: -number).result(60) == 1
    threads.shutdown()
    assert not any(thread.is_alive() for thread in threads._threads)
    with pytest.raises(RuntimeError, match="not accepted after shutdown"):
        threads.submit(int)


def test_the_end_cancels_what_has_not_begun_and_waits_for_nothing_that_hangs():
    threads, goes_on, has_begun = DaemonThreadPool(1, "test"), threading.Event(), threading.Event()

    def hang():
        has_begun.set()
        return goes_on.wait(60)

    hung = threads.submit(hang)
    assert has_begun.wait(60)
    waits = threads.submit(int)
    cancelled = threads.submit(int)
    assert cancelled.cancel()
    threads.shutdown(wait=False, cancel_futures=True)
    assert wait([waits, cancelled], 60).not_done == set() and waits.cancelled()
    assert not hung.done() and all(thread.daemon for thread in threads._threads)
    goes_on.set()
    assert hung.result(60)
    threads._threads[0].join(60)
    assert not threads._threads[0].is_alive()
