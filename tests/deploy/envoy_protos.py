"""Reads configurations as Envoy's published messages: a list on standard input, a list of complaints as the answer.

A process of its own, whose PYTHONPATH has the packages of the extra `envoy` in front, for they bring other copies of
messages that jpaged's own packages have. "" stands for a configuration that is read whole.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from jpaged import json_text

_TYPE_URL = "type.googleapis.com/"


def types_named(value: Any) -> Iterator[str]:
    """The names of the messages that stand in `@type`, anywhere."""
    if isinstance(value, dict):
        if isinstance(value.get("@type"), str):
            yield value["@type"].removeprefix(_TYPE_URL)
        for part in value.values():
            yield from types_named(part)
    elif isinstance(value, list):
        for part in value:
            yield from types_named(part)


def load_package(name: str) -> None:
    """Imports the modules of a message's package, after which it can be read; none where there is no such package."""
    *words, _ = name.split(".")
    for root in map(Path, sys.path):
        for path in sorted(root.joinpath(*words).glob("*_pb2.py")):
            importlib.import_module(".".join([*words, path.stem]))


def complaint(written: Any) -> str:
    """What Envoy's messages object to in a configuration."""
    for name in types_named(written):
        load_package(name)
    try:
        json_format.ParseDict(written, importlib.import_module("envoy.config.bootstrap.v3.bootstrap_pb2").Bootstrap())
    except json_format.ParseError as error:
        return str(error)
    return ""


def main() -> None:
    """Answers what stands on standard input."""
    sys.stdout.write(json_text.dumps([complaint(written) for written in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
