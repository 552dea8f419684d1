"""llama.cpp's server on its core, and a client of it, which runs elsewhere if it can: what it costs is not the peer's.

Options are flags of `llama-server` with underscores; `binary` is its path.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time

from benchmarks.peers.workers.protocol import Answer, Settings, process_s, serve
from benchmarks.peers.workloads import Job

REQUEST_LIMIT_S = 3600.0
READY_LIMIT_S = 300.0


class LlamaServer:
    """A running llama-server with as many slots as it has streams."""

    def __init__(self, settings: Settings) -> None:
        options = dict(settings.options)
        binary = options.pop("binary")
        self._num_slots = options["parallel"]
        self._port = _free_port()
        flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        address = ["--host", "127.0.0.1", "--port", str(self._port), "--slot-save-path", os.curdir, "--no-webui"]
        command = ["taskset", "-c", str(settings.core), binary, "--model", settings.folder, *address, *flags]
        begin = time.perf_counter()
        self._server = subprocess.Popen(command, stdout=sys.stderr, stderr=sys.stderr)
        self._wait(begin + READY_LIMIT_S)
        self._ready_s = time.perf_counter() - begin

    def about(self) -> dict[str, object]:
        return {"llama.cpp": self._ask("GET", "/props").get("build_info"), "ready_s": self._ready_s}

    def forget(self) -> None:
        for slot in range(self._num_slots):
            self._ask("POST", f"/slots/{slot}?action=erase", {})

    def run(self, jobs: list[Job]) -> Answer:
        waiting: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        for index, job in enumerate(jobs):
            for sample in range(job.n):
                waiting.put((index, sample))
        done: dict[tuple[int, int], tuple[list[int], float, float]] = {}
        failures: list[Exception] = []
        begin = time.perf_counter()

        def answer_jobs() -> None:
            while not failures:
                try:
                    key = waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    done[key] = self._answer(jobs[key[0]], begin)
                except (OSError, RuntimeError, http.client.HTTPException) as error:
                    failures.append(error)

        threads = [threading.Thread(target=answer_jobs) for _ in range(min(waiting.qsize(), self._num_slots))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wall_s = time.perf_counter() - begin
        if failures:
            raise failures[0]
        outputs = [[done[index, sample][0] for sample in range(job.n)] for index, job in enumerate(jobs)]
        return Answer(outputs, wall_s, [ttft for _, ttft, _ in done.values()], [tpot for *_, tpot in done.values()])

    def processor_s(self) -> float:
        return process_s(self._server.pid)

    def close(self) -> None:
        self._server.terminate()
        self._server.wait()

    def _answer(self, job: Job, begin: float) -> tuple[list[int], float, float]:
        """Returns a sequence, the seconds to its first token and between its tokens, by the server's own clock."""
        is_greedy = job.temperature == 0
        body = {
            "prompt": list(job.prompt),
            "n_predict": job.max_tokens,
            "temperature": job.temperature,
            "top_k": 1 if is_greedy else 0,
            "samplers": ["top_k" if is_greedy else "temperature"],
            "ignore_eos": True,
            "cache_prompt": True,
            "return_tokens": True,
        }
        answer = self._ask("POST", "/completion", body)
        end = time.perf_counter()
        decode_s = answer["timings"]["predicted_ms"] / 1e3
        return answer["tokens"], end - begin - decode_s, decode_s / max(1, answer["timings"]["predicted_n"])

    def _ask(self, method: str, path: str, body: object = None) -> dict:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=REQUEST_LIMIT_S)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
        finally:
            connection.close()
        if response.status != http.HTTPStatus.OK:
            raise RuntimeError(f"llama-server answered {path} with {response.status}: {text[:300]}")
        return json.loads(text)

    def _wait(self, deadline: float) -> None:
        while time.perf_counter() < deadline:
            if self._server.poll() is not None:
                raise RuntimeError(f"llama-server ended with {self._server.returncode} before it was ready")
            try:
                self._ask("GET", "/health")
                return
            except (OSError, RuntimeError):  # not there yet, or loading
                time.sleep(0.02)
        raise RuntimeError(f"llama-server was not ready after {READY_LIMIT_S:.0f} s")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    serve(LlamaServer)
