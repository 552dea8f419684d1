"""What the process of a server does beside the server: here, without one."""

import gc
from types import SimpleNamespace

from jpaged.cli import serve
from jpaged.cli.main import make_parser
from jpaged.config import EngineConfig
from jpaged.service.loaded_model import BackendFacts
from tests.server.harness import MODEL


def test_what_was_loaded_is_left_out_of_collections(monkeypatch, capsys):
    loaded = SimpleNamespace(config=EngineConfig(), backend=BackendFacts("cpu", "cpu", 1, "xla", "0"), model=MODEL)
    frozen = []

    class Serving:
        """Stands in for a server that is told to end as soon as its model is loaded."""

        metrics_port = control_port = probe_port = None
        http_port = 8001
        leaves_threads = False

        def __init__(self, config, load, *, on_progress, on_serving, on_hang, prefills):
            self.on_serving = on_serving

        async def start(self):
            return 1

        def stop_on_signals(self):
            """There are none."""

        async def run(self):
            frozen.append(gc.get_freeze_count())
            self.on_serving(1, loaded)
            frozen.append(gc.get_freeze_count())
            return 0

    monkeypatch.setattr("jpaged.server.lifecycle.Server", Serving)
    try:
        assert serve.run(make_parser().parse_args(["serve"])) == 0
    finally:
        gc.unfreeze()
    assert frozen[0] < frozen[1]
    lines = capsys.readouterr().err.splitlines()
    assert lines[-5:-1] == [
        "gRPC on 127.0.0.1:1",
        "OpenAI's API on http://127.0.0.1:8001/v1",
        "try: curl http://127.0.0.1:8001/v1/chat/completions -H 'Content-Type: application/json' "
        """-d '{"model": "fake", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}'""",
        "ready on 127.0.0.1:1",
    ]
