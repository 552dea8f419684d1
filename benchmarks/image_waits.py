"""Time between the tokens of a text stream while another tenant sends pictures that take long to read and to encode.

    alone      no pictures
    pictures   four requests at a time, each with 8 JPEG files of 40 megapixels

The demo's captioner has a small encoder, so its pictures are mainly decoded. The other model has layers of SigLIP in
the width of Gemma 3's and random weights next to a small language model, so its pictures are mainly encoded.

    python -m benchmarks.image_waits [--seconds 20] [--layers 27] [--models captioner siglip]
"""

from __future__ import annotations

import argparse
import base64
import http.client
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.record import save
from jpaged.demo import CAPTIONER_FOLDER

_PORT = re.compile(r"http://\S*?:(?P<port>\d+)")
_KEYS = """
[[keys]]
id = "text"
tenant = "text"
token = "text-0123456789abcdef"

[[keys]]
id = "pictures"
tenant = "pictures"
token = "pictures-0123456789abcdef"
"""
_HEIGHT, _WIDTH = 5000, 8000
_NUM_IMAGES = 8
_NUM_SENDERS = 4
_NUM_TOKENS = 400
LIMIT_S = 0.25
_TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ '14,' if p.type == 'image' else p.text }}{% endfor %}{% endif %}{% endfor %}"
)


def write_siglip(folder: Path, num_layers: int) -> None:
    """Write the config of a small Gemma 3 with layers of the published SigLIP, and a tokenizer of numbers."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    encoder = {"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304}
    encoder |= {"num_attention_heads": 16, "num_hidden_layers": num_layers, "patch_size": 14, "image_size": 896}
    text = {"model_type": "gemma3_text", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512}
    text |= {"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    text |= {"query_pre_attn_scalar": 64, "sliding_window": 512, "max_position_embeddings": 8192}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "image_token_index": 10}
    config |= {"boi_token_index": 14, "eoi_token_index": 15, "mm_tokens_per_image": 256}
    (folder / "config.json").write_text(json.dumps({**config, "vision_config": encoder, "text_config": text}))
    names = {16: "\n", 17: "\n\n", 18: "\n\n\n"}
    inner = Tokenizer(models.WordLevel({names.get(n, f"{n},"): n for n in range(512)}, unk_token="0,"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d+,"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "template.jinja").write_text(_TEMPLATE)


def make_photo() -> bytes:
    """Return a JPEG of 40 megapixels, smooth with some noise, as photos are."""
    random = np.random.default_rng(0)
    small = random.integers(0, 256, (_HEIGHT // 50, _WIDTH // 50, 3), dtype=np.uint8)
    photo = Image.fromarray(small).resize((_WIDTH, _HEIGHT), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    photo.save(file, "JPEG", quality=90)
    return file.getvalue()


@contextmanager
def serving(model: Path, *options: str) -> Iterator[int]:
    """Run a server with a key for each of two tenants; yield its port of HTTP."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder, "keys.toml")
        keys.write_text(_KEYS)
        keys.chmod(0o600)
        command = [
            sys.executable,
            "-m",
            "jpaged",
            "serve",
            str(model),
            "--port",
            "0",
            "--http-port",
            "0",
            "--api-keys",
            str(keys),
        ]
        command += ["--max-request-size", "64", *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None
            seen = []
            for line in process.stdout:
                seen.append(line)
                if "ready" in line and (found := _PORT.search("".join(seen))):
                    break
            else:
                raise RuntimeError("".join(seen))
            threading.Thread(target=process.stdout.read, daemon=True).start()
            try:
                yield int(found["port"])
            finally:
                process.kill()  # requests with pictures may be pending


def post(port: int, tenant: str, body: bytes) -> http.client.HTTPResponse:
    """Send a chat of a tenant; return the response, unread."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    headers = {"Authorization": f"Bearer {tenant}-0123456789abcdef", "Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", body, headers)
    return connection.getresponse()


def read_gaps(port: int, seconds: float) -> list[float]:
    """Return the times between the events of streams of text, one stream after another."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "20,21,22,"}], "stream": True}
    body |= {"max_tokens": _NUM_TOKENS, "ignore_eos": True, "temperature": 0}
    gaps, end_s = list[float](), time.monotonic() + seconds
    while time.monotonic() < end_s:
        response, before_s = post(port, "text", json.dumps(body).encode()), None
        while line := response.readline():
            if line.startswith(b"data: {"):
                now_s = time.monotonic()
                if before_s is not None:
                    gaps.append(now_s - before_s)
                before_s = now_s
                if now_s > end_s:
                    break
        response.close()
    return gaps


def send(port: int, photo: bytes, number: int, statuses: SimpleQueue[int]) -> None:
    """Send chats with pictures of another tenant without end, with the lowest priority, as if from another machine."""
    os.nice(19)
    while True:
        response = post(port, "pictures", make_body(photo, number))
        response.read()
        statuses.put(response.status)
        number += _NUM_SENDERS


@contextmanager
def sending(port: int, photo: bytes) -> Iterator[SimpleQueue[int]]:
    """Send chats with pictures from some processes until the context ends; yield the statuses.

    Bodies of this size hold the GIL while they are written, so the process that reads the stream must not do that.
    """
    context = get_context("spawn")
    statuses: SimpleQueue[int] = context.SimpleQueue()
    senders = [context.Process(target=send, args=(port, photo, number, statuses)) for number in range(_NUM_SENDERS)]
    for sender in senders:
        sender.start()
    try:
        yield statuses
    finally:
        for sender in senders:
            sender.kill()
            sender.join()


def drain(statuses: SimpleQueue[int]) -> list[int]:
    """Return the statuses so far."""
    found = []
    while not statuses.empty():
        found.append(statuses.get())
    return found


def vary(photo: bytes, number: int) -> bytes:
    """Return a JPEG with other pixels: the quantization of two frequencies differs, so that no cache has it."""
    table = photo.index(b"\xff\xdb") + 5  # after marker, length, and number of the table
    changed = bytearray(photo)
    changed[table + 62 : table + 64] = bytes([1 + number // 200, 1 + number % 200])
    return bytes(changed)


def make_body(photo: bytes, number: int) -> bytes:
    """Return a chat with several pictures, which differ from those of other numbers."""
    photos = [vary(photo, number * _NUM_IMAGES + image) for image in range(_NUM_IMAGES)]
    uris = ["data:image/jpeg;base64," + base64.b64encode(one).decode() for one in photos]
    parts = [{"type": "image_url", "image_url": {"url": uri}} for uri in uris]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "20,"}]}]
    return json.dumps({"messages": messages, "max_tokens": 1}).encode()


def summary(gaps: list[float]) -> dict[str, float]:
    """Return percentiles in milliseconds, and the share of gaps over the limit."""
    ms = 1000 * np.array(gaps)
    found = {f"p{q:g}_ms": round(float(np.percentile(ms, q)), 2) for q in (50, 99, 99.9)}
    return {
        "gaps": len(ms),
        **found,
        "max_ms": round(float(ms.max()), 1),
        "over_limit": int((ms > 1000 * LIMIT_S).sum()),
    }


def measure(model: Path, options: list[str], seconds: float, photo: bytes) -> dict[str, Any]:
    """Return the gaps of a model's streams alone and next to pictures."""
    found = dict[str, Any]()
    with serving(model, *options) as port:
        post(port, "pictures", make_body(photo, 99)).read()  # compiles
        read_gaps(port, 2)
        found["alone"] = summary(read_gaps(port, seconds))
        with sending(port, photo) as statuses:
            gaps = read_gaps(port, seconds)
            answered = drain(statuses)
        found["pictures"] = summary(gaps) | {"requests": len(answered)}
        found["statuses"] = sorted(set(answered))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure text streams next to pictures.")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--layers", type=int, default=27)
    parser.add_argument("--models", nargs="+", default=["captioner", "siglip"])
    parser.add_argument("--dry", action="store_true", help="write no results")
    given = parser.parse_args()
    photo, results = make_photo(), dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        for name in given.models:
            model, options = CAPTIONER_FOLDER, ["--max-model-len", "512"]
            if name == "siglip":
                model = Path(folder)
                write_siglip(model, given.layers)
                options = ["--load-format", "dummy", "--dtype", "float32", "--max-model-len", "4096"]
                options += ["--num-blocks", "1024", "--chat-template", str(model / "template.jinja")]
            results[name] = measure(model, options, given.seconds, photo)
            print(name, json.dumps(results[name], indent=1), flush=True)
    if not given.dry:
        save("image_waits", " ".join(["python -m benchmarks.image_waits", *sys.argv[1:]]), results)


if __name__ == "__main__":
    main()
