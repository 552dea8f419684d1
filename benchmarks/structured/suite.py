"""The public JSON-Schema-Test-Suite, which the source package of `jsonschema` ships: what each library gets right.

    pip download --no-binary :all: --no-deps jsonschema     # the archive whose path is given

A group is a schema with instances, some valid. A library may refuse the schema, and say so; where it takes it, every
valid instance must be accepted, token by token, and no invalid one. Instances are written without whitespace, once as
they stand and once with properties in the order of the schema, which both libraries ask for. Each group runs in a
process of its own, so that a crash or a compile without end is that group's.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.structured.libraries import Library
from benchmarks.structured.vocabularies import Tokens

DRAFTS = ("draft7", "draft2020-12")
_TIMEOUT_S = 20.0
_CPP_PLACE = re.compile(r"^\[[\d:]+\] \S+: ")
_ORDERED = ("properties", "required", "dependentRequired")


@dataclass(frozen=True)
class Group:
    """A schema, and instances with whether they are valid."""

    draft: str
    keyword: str
    description: str
    schema: Any
    tests: list[tuple[Any, bool]]


@dataclass(frozen=True)
class Outcome:
    """What a library did with a group.

    Attributes:
        error: why it took no part in it; None where it compiled.
        num_refused: valid instances that it does not accept.
        num_let_by: invalid instances that it accepts.
    """

    error: str | None
    num_refused: int = 0
    num_let_by: int = 0

    @property
    def is_right(self) -> bool:
        return self.error is None and self.num_refused == 0 and self.num_let_by == 0


def groups(archive: Path) -> Iterator[Group]:
    """The groups of the required parts of both drafts."""
    with tarfile.open(archive) as files:
        for member in sorted(files.getmembers(), key=lambda one: one.name):
            path = Path(member.name)
            if path.suffix != ".json" or path.parent.name not in DRAFTS or path.parent.parent.name != "tests":
                continue
            content = files.extractfile(member)
            assert content is not None
            for group in json.load(content):
                tests = [(test["data"], test["valid"]) for test in group["tests"]]
                yield Group(path.parent.name, path.stem, group["description"], group["schema"], tests)


def outcome(library: Library, tokens: Tokens, group: Group) -> Outcome:
    """Run one group in a fork."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(library, tokens, group, theirs))
    process.start()
    theirs.close()
    try:
        found: Outcome = ours.recv() if ours.poll(_TIMEOUT_S) else Outcome(f"takes over {_TIMEOUT_S:g} s")
    except EOFError:
        found = Outcome("ends the process")
    process.kill()
    process.join()
    return found


def _run(library: Library, tokens: Tokens, group: Group, answer: Connection) -> None:
    try:
        compiled = library.compile("json", json.dumps(group.schema))
    except ValueError as error:
        answer.send(Outcome(_CPP_PLACE.sub("", str(error).partition("\n")[0]) or type(error).__name__))
        return
    num_refused = num_let_by = 0
    for instance, is_valid in group.tests:
        texts = {_written(instance), _written(_in_order(instance, _order(group.schema)))}
        is_accepted = any(_accepts(library, tokens, compiled, text) for text in texts)
        num_refused += is_valid and not is_accepted
        num_let_by += is_accepted and not is_valid
    answer.send(Outcome(None, num_refused, num_let_by))


def _accepts(library: Library, tokens: Tokens, compiled: Any, text: str) -> bool:
    matcher = library.start(compiled)
    return all(matcher.accept(token_id) for token_id in (*tokens.encode(text), tokens.eos_token_id))


def _written(instance: Any) -> str:
    return json.dumps(instance, ensure_ascii=False, separators=(",", ":"))


def _order(schema: Any) -> list[str]:
    """The names of properties in the order in which a schema mentions them."""
    found: dict[str, None] = {}
    left = [schema]
    while left:
        part = left.pop(0)
        if isinstance(part, dict):
            for key in _ORDERED:
                value = part.get(key)
                if isinstance(value, dict | list):
                    found.update((name, None) for name in value if isinstance(name, str))
            left += part.values()
        elif isinstance(part, list):
            left += part
    return list(found)


def _in_order(instance: Any, order: list[str]) -> Any:
    if isinstance(instance, list):
        return [_in_order(one, order) for one in instance]
    if not isinstance(instance, dict):
        return instance
    names = sorted(instance, key=lambda name: order.index(name) if name in order else len(order))
    return {name: _in_order(instance[name], order) for name in names}
