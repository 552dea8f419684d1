"""HTTP server for scrapes: a thread for each connection, and few connections.

Prometheus sends one request per connection and closes it. An idle connection is closed after TIMEOUT_S, or if it is the
oldest of MAX_CONNECTIONS when the next one arrives. So a scrape is answered whatever other peers do.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

_LOG = logging.getLogger(__name__)

MAX_CONNECTIONS = 16
TIMEOUT_S = 10.0
_STOP_INTERVAL_S = 0.05
"""Interval at which the thread looks for `stop`, which waits for it; the default of socketserver is half a second."""
_PAUSE_S = 0.1
"""Pause if no file descriptor is left for the next connection: it stays pending, so select would return at once."""


class _Handler(WSGIRequestHandler):
    timeout = TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        _LOG.debug(format, *args)


class ScrapeServer(ThreadingMixIn, WSGIServer):
    """HTTP server that runs a WSGI application on a port until `stop`; 0 is a free port.

    Raises:
        OSError: the port is unavailable.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, app: Callable[..., Any], host: str, port: int) -> None:
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._lock = threading.Lock()
        self._open: dict[socket.socket, None] = {}  # the oldest first
        self._places = threading.Semaphore(MAX_CONNECTIONS)
        super().__init__((host, port), _Handler)
        self.set_app(app)
        self._thread = threading.Thread(
            target=self.serve_forever, args=(_STOP_INTERVAL_S,), name="jpaged-metrics", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop the server, and wait for the thread."""
        self.shutdown()
        self.server_close()
        self._thread.join()

    def get_request(self) -> tuple[Any, Any]:
        """Accept the next connection; called when there is one."""
        try:
            return super().get_request()
        except OSError:
            self._cut_off_oldest()
            time.sleep(_PAUSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a connection on a new thread, once there is a slot."""
        if not self._places.acquire(blocking=False):
            self._cut_off_oldest()
            self._places.acquire()
        with self._lock:
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, which ends its thread."""
        with self._lock:
            had_place = request in self._open
            self._open.pop(request, None)
        super().shutdown_request(request)
        if had_place:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log at debug level: a peer that is silent, sends garbage, or is gone, is not a server error."""
        _LOG.debug("no answer to %s", client_address, exc_info=True)

    def _cut_off_oldest(self) -> None:
        with self._lock:
            oldest = next(iter(self._open), None)
            if oldest is not None:
                try:
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread reads the end
                except OSError:  # the peer was faster
                    return
