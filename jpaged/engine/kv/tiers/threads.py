"""Daemon threads for disk I/O: a hanging call never prevents the process from exiting."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

_Call = tuple[Future[Any], Callable[[], Any]]


class DiskThreads(Executor):
    """Executor that runs calls in the order of submission on daemon threads, unlike `ThreadPoolExecutor`."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_over = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True) for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._is_over:
                raise RuntimeError("calls are not accepted after shutdown")
            self._calls.put((future, lambda: fn(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stop the threads after the submitted or the running calls; a later call with `wait` joins them."""
        with self._lock:
            self._is_over = True
        while cancel_futures:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                break
            if call is not None and call[0].cancel():
                call[0].set_running_or_notify_cancel()
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:  # raised by the caller's `result()`
                future.set_exception(error)
