"""Flags of vLLM's `vllm serve`: the table, and the translation of a command line that has some.

`vllm_flags.tsv` has one row per flag:

    flags      all spellings, the first one in dashes; `--no-` forms of switches and underscores are accepted too
    kind       switch, value, optional, list or json
    outcome    same         the option exists under this name
               alias        the option has another name, which is logged
               unnecessary  dropped and logged, because it cannot change a result
               unsupported  an error with the reason, except with `values` or in its `--no-` form
    option     the option of an alias; `!` inverts a switch; of others the nearest one
    values     same: GIVEN=OURS, an empty OURS drops the flag; unsupported: values, or keys of JSON, without an effect
    reason     reason, or difference
    version    version of vLLM in which the flag was read, or `older`
"""

from __future__ import annotations

import argparse
import difflib
import functools
import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, get_args

from jpaged import json_text
from jpaged.cli.options import add_config_flags, config_values, merge_json_flags, to_flag
from jpaged.config import iter_options
from jpaged.errors import InvalidArgument

TABLE = Path(__file__).with_suffix(".tsv")
VERSION = "0.32"
"""Version of vLLM whose flags the table has completely."""
Outcome = Literal["same", "alias", "unnecessary", "unsupported"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
_NUMBER = re.compile(r"-\d+|-\d*\.\d+")
_COORDINATOR = {"--master-addr": "127.0.0.1", "--master-port": "29501", "--nnodes": "1", "--node-rank": "0"}
"""Flags of several hosts and vLLM's defaults."""
_FURTHER = {"--served-model-name": "--served-model-aliases"}
"""Options for the second and later values of a list."""
_EVENTS = {
    "endpoint": "--kv-events-endpoint",
    "replay_endpoint": "--kv-events-replay-endpoint",
    "topic": "--kv-events-topic",
    "buffer_steps": "--kv-events-buffer",
}
_EVENTS_SWITCHES = ("enable_kv_cache_events", "publisher", "hwm", "max_queue_size")
"""Keys of `--kv-events-config`: those with an option, and the others."""


class VllmFlag(NamedTuple):
    """A row of the table."""

    names: tuple[str, ...]
    kind: str
    outcome: Outcome
    option: str
    values: tuple[str, ...]
    reason: str
    version: str

    @property
    def name(self) -> str:
        """The flag's first spelling."""
        return self.names[0]


@functools.cache
def read_flags() -> tuple[VllmFlag, ...]:
    """Return the rows of the table."""
    rows = (line.split("\t") for line in TABLE.read_text(encoding="utf-8").splitlines()[1:])
    return tuple(
        VllmFlag(tuple(names.split()), kind, OUTCOMES[OUTCOMES.index(outcome)], option, tuple(values.split()), *rest)
        for names, kind, outcome, option, values, *rest in rows
    )


@functools.cache
def _by_name() -> dict[str, VllmFlag]:
    return {name: flag for flag in read_flags() for name in flag.names}


def find_flag(word: str) -> VllmFlag | None:
    """Return the row of a spelling in dashes or of a `--no-` form; None if vLLM has no such flag."""
    rows = _by_name()
    found = rows.get(word)
    if found is None and word.startswith("--no-"):
        found = rows.get(f"--{word.removeprefix('--no-')}")
        return found if found is not None and found.kind == "switch" else None
    return found


def translate(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Replace vLLM's flags by the options of a command.

    Returns:
        The words for the parser, and a line for each flag that was replaced or dropped.

    Raises:
        InvalidArgument: a flag has no value, or would need what jpaged does not have; names it and the reason.
    """
    translation = _Translation(parser, words)
    translation.run()
    return translation.finish(), list(dict.fromkeys(translation.notes))


_OFFLINE = ("model", "cache", "lossy", "scheduler", "parallel", "lora", "startup", "timeouts")
"""Sections of the options of a model in the caller's process."""


class _EngineParser(argparse.ArgumentParser):
    """Parser of engine options, which raises InvalidArgument instead of exiting."""

    def error(self, message: str) -> NoReturn:
        flag = re.search(r"--[\w-]+", message)
        raise InvalidArgument(flag[0] if flag else "options", message)


def _engine_parser() -> argparse.ArgumentParser:
    parser = _EngineParser(add_help=False, allow_abbrev=False)
    add_config_flags(parser, _OFFLINE)
    return parser


def translate_options(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Replace vLLM's engine arguments, as keywords of `LLM`, by jpaged's options.

    Returns:
        The options, and a line for each argument that was replaced or dropped. Unknown names are kept.

    Raises:
        InvalidArgument: an argument is invalid or not supported; named as the keyword.
    """
    known = {name for name, _, _ in iter_options()}
    options, words = dict(given), list[str]()
    for name, value in given.items():
        flag = find_flag(to_flag(name))
        if flag is None or (name in known and not any(one.startswith(f"{value}=") for one in flag.values)):
            continue
        del options[name]
        words += _to_words(to_flag(name), flag, value)
    if not words:
        return options, []
    parser = _engine_parser()
    try:
        words, notes = translate(parser, words)
        options |= config_values(parser.parse_args(words))
    except InvalidArgument as error:
        name = error.field.removeprefix("--").replace("-", "_")
        raise InvalidArgument(name, error.problem.replace("this flag of vLLM", "this argument of vLLM")) from error
    return options, notes


def _to_words(name: str, flag: VllmFlag, value: Any) -> list[str]:
    if isinstance(value, bool) and flag.kind in ("switch", "optional"):
        return [name if value else f"--no-{name.removeprefix('--')}"]
    if isinstance(value, Mapping):
        return [name, json_text.dumps(value)]
    if isinstance(value, list | tuple):
        return [name, *map(str, value)]
    return [f"{name}={value}"]


def is_engine_argument(name: str) -> bool:
    """Return True if a name is an option of a model, or the keyword of a flag of vLLM."""
    return find_flag(to_flag(name)) is not None or any(name == one for one, _, _ in iter_options())


def add_engine_arguments(parser: argparse._ActionsContainer) -> None:
    """Add the options of a model in this process, and vLLM's flags, under the names of their keywords."""
    taken = set()
    for action in _engine_parser()._actions:
        if action.option_strings:
            action.dest = action.dest.removeprefix("config_")
            parser._add_action(action)
            taken |= {*action.option_strings}
    for flag in read_flags():
        names = [name for name in flag.names if name.startswith("--") and name not in taken]
        if not names or flag.name in taken:
            continue
        taken |= {*names, *(f"--no-{name.removeprefix('--')}" for name in names)}
        how: dict[str, Any] = {"default": None, "help": argparse.SUPPRESS}
        if flag.kind == "switch":
            how["action"] = argparse.BooleanOptionalAction
        elif flag.kind in ("list", "optional"):
            how["nargs"] = "+" if flag.kind == "list" else "?"
        parser.add_argument(*names, **how)


def suggest(parser: argparse.ArgumentParser, words: Sequence[str], *, has_vllm_flags: bool) -> str:
    """Return the options that unrecognized words resemble, as text: "did you mean --a, --b?", or ""."""
    known = {name: name for name in parser._option_string_actions}
    if has_vllm_flags:
        for flag in read_flags():
            known.setdefault(flag.name, flag.option.lstrip("!") if flag.outcome == "alias" else flag.name)
    found = []
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--"):
            found += [known[match] for match in difflib.get_close_matches(name, known, 1, 0.7)]
    return f"did you mean {', '.join(dict.fromkeys(found))}?" if found else ""


class _Translation:
    """The command line of one command, word by word."""

    def __init__(self, parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
        self.notes: list[str] = []
        self._native: dict[str, argparse.Action] = parser._option_string_actions
        self._left = deque(words)
        self._rest: list[str] = []
        self._out: list[str] = []
        self._hosts: dict[str, str] = {}
        self._has_keys = self._has_model = False

    def run(self) -> None:
        """Translate all words up to `--`."""
        while self._left:
            word = self._left.popleft()
            if word == "--":
                self._rest = [word, *self._left]
                return
            if self._is_flag(word):
                self._translate(word)
            else:
                self._has_model = True
                self._out.append(word)

    def finish(self) -> list[str]:
        """Return the words for the parser."""
        if _int_or_none(self._hosts.get("--nnodes", "1")) == 1:
            self._hosts.clear()
        if self._hosts:
            hosts = {**_COORDINATOR, **self._hosts}
            self._out += ["--coordinator", f"{hosts['--master-addr']}:{hosts['--master-port']}"]
            self._out += ["--num-processes", hosts["--nnodes"], "--process-id", hosts["--node-rank"]]
        if self.notes and self._is_given("--port") and not self._is_given("--http-port"):
            self.notes.append("--port is the gRPC port; the OpenAI API has its own (--http-port, 8000 by default)")
        words = [*self._out, *self._rest]
        return merge_json_flags(words) if self._has_keys else words

    def _is_given(self, flag: str) -> bool:
        return any(word.partition("=")[0] == flag for word in self._out)

    @staticmethod
    def _is_flag(word: str) -> bool:
        return word.startswith("-") and word != "-" and not _NUMBER.fullmatch(word)

    def _has_value(self) -> bool:
        return bool(self._left) and not self._is_flag(self._left[0])

    def _translate(self, word: str) -> None:
        name, equals, value = word.partition("=")
        flag, key = find_flag(name), ""
        if flag is None and name not in self._native:
            base, _, key = name.partition(".")
            flag = find_flag(base)
            if flag is None and re.match(r"-O\d", name):
                flag, name, equals, value = find_flag("-O"), "-O", "=", name[2:]
        if flag is None or (name in self._native and flag.outcome != "same"):
            self._keep(word, name, equals)
        elif flag.outcome in ("same", "alias"):
            self._rename(flag, name, key, equals, value)
        elif flag.outcome == "unnecessary":
            shown = self._shown(name, self._take(flag, name, equals, value))
            self.notes.append(f"{shown} has no effect: {flag.reason}")
        else:
            self._refuse(flag, name, key, self._take(flag, name, equals, value))

    def _keep(self, word: str, name: str, equals: str) -> None:
        """Keep a flag of this command, or an unknown one, with its value."""
        self._out.append(word)
        action = self._native.get(name)
        if action is not None and not equals and action.nargs is None and self._left:
            self._out.append(self._left.popleft())

    def _take(self, flag: VllmFlag, name: str, equals: str, value: str) -> list[str]:
        """Return the values of a flag.

        Raises:
            InvalidArgument: it needs one and has none.
        """
        if equals:
            return [value]
        if flag.kind == "switch" or (flag.kind == "optional" and not self._has_value()):
            return []
        if not self._has_value():
            raise InvalidArgument(name, "has no value")
        values = [self._left.popleft()]
        is_pair = flag.name == "--lora-modules"  # MODEL may follow them
        while flag.kind == "list" and self._has_value() and (not is_pair or re.search(r"[={]", self._left[0])):
            values.append(self._left.popleft())
        return values

    @staticmethod
    def _shown(name: str, values: Sequence[str]) -> str:
        return " ".join([name, *(one if len(one) <= 60 else f"{one[:57]}..." for one in values)])

    def _rename(self, flag: VllmFlag, name: str, key: str, equals: str, value: str) -> None:
        """Replace a flag by an option of this command, or keep it if the command has no such option."""
        option = flag.name if flag.outcome == "same" else flag.option
        target, _, inner = option.lstrip("!").partition(".")
        if target not in self._native:
            self._keep(f"{name}{equals}{value}", name, equals)
            return
        if flag.kind == "switch":
            is_off = (name.startswith("--no-") and name not in flag.names) != option.startswith("!")
            given = f"--no-{target.removeprefix('--')}" if is_off else target
            self._out.append(f"{given}{equals}{value}")
            self._note(name, given)
            return
        values = self._take(flag, name, equals, value) if flag.outcome == "alias" or key else []
        if flag.name == "--kv-events-config":
            self._convert_events(name.partition(".")[0], key, values[-1])
        elif flag.name in _COORDINATOR:
            self._hosts[flag.name] = values[-1]
            self._note(name, flag.option)
        elif flag.outcome == "alias" or key:
            path = ".".join(filter(None, (inner, key)))
            self._has_keys = self._has_keys or bool(path)
            given = f"{target}.{path}" if path else target
            for one in _convert(flag.name, name, values):
                self._out += [given, one]
            self._note(name, given)
        elif flag.kind == "list":
            self._repeat(flag, name, equals, value)
        else:
            self._map_value(flag, name, equals, value)

    def _repeat(self, flag: VllmFlag, name: str, equals: str, value: str) -> None:
        """Keep an option of the same name with its values; after one, further words are MODEL unless that is given.

        Raises:
            InvalidArgument: there are several values for an option that takes one.
        """
        values = [value] if equals else [self._left.popleft()] if self._has_value() else []
        while not equals and self._has_value() and (self._has_model or self._is_given("--model")):
            values.append(self._left.popleft())
        further = _FURTHER.get(flag.name, flag.name)
        if len(values) > 1 and further not in self._native:
            raise InvalidArgument(name, f"{' '.join(values)}: only one is supported")
        self._out += [f"{flag.name}={one}" for one in values[:1]] or [flag.name]
        self._out += [f"{further}={one}" for one in values[1:]]
        if values[1:]:
            self._note(name, further)

    def _map_value(self, flag: VllmFlag, name: str, equals: str, value: str) -> None:
        """Keep an option of the same name with its value, or ours for it."""
        if not equals:
            if not self._has_value():
                self._out.append(flag.name)  # the parser reports it
                return
            value = self._left.popleft()
        ours = dict(pair.split("=") for pair in flag.values).get(value, value)
        if ours != value:
            self.notes.append(f"{name} {value} is {ours or 'the default'} here: {flag.reason}")
        elif name != flag.name:
            self._note(name, flag.name)
        if ours or not value:
            self._out.append(f"{flag.name}={ours}")

    def _note(self, name: str, ours: str) -> None:
        if name != ours:
            self.notes.append(f"{name} is {ours} here")

    def _refuse(self, flag: VllmFlag, name: str, key: str, values: Sequence[str]) -> None:
        """Drop a flag that turns an unsupported feature off; raise InvalidArgument for any other."""
        is_off = flag.kind == "switch" and name not in flag.names
        if flag.kind == "json":
            is_off = {key.partition(".")[0]} <= set(flag.values) if key else _keys(values[-1]) <= set(flag.values)
        elif values:
            is_off = " ".join(values) in flag.values
        if is_off:
            self.notes.append(f"{self._shown(name, values)} has no effect: {flag.reason}")
            return
        nearest = f"; the nearest option is {flag.option}" if flag.option in self._native else ""
        problem = f"this flag of vLLM is not supported: {flag.reason}{nearest}"
        if flag.values and flag.kind != "json":
            problem = f"{' '.join(values)} is not supported, only {', '.join(flag.values)}: {flag.reason}{nearest}"
        raise InvalidArgument(name, problem)

    def _convert_events(self, name: str, key: str, text: str) -> None:
        """Convert the configuration of KV cache events, given as JSON or by key.

        Raises:
            InvalidArgument: it is not a JSON object, or has an unknown key.
        """
        given: dict[str, Any] = {key: text} if key else _parse_object(name, text)
        for one in given:
            if one not in (*_EVENTS, *_EVENTS_SWITCHES):
                raise InvalidArgument(f"{name}.{one}", f"is unknown: must be one of {', '.join(_EVENTS)}")
        if given.get("publisher") == "null" or given.get("enable_kv_cache_events") is False:
            self.notes.append(f"{name} has no effect: KV cache events are off unless they have an endpoint")
            return
        if not key:
            given.setdefault("endpoint", "tcp://*:5557")
        for one, value in given.items():
            if one in _EVENTS and value is not None:
                self._out.append(f"{_EVENTS[one]}={value}")
                self._note(f"{name}.{one}", _EVENTS[one])


def _convert(flag: str, name: str, values: Sequence[str]) -> list[str]:
    """Return the values of an alias as the option takes them.

    Raises:
        InvalidArgument: one is not the JSON that the flag takes.
    """
    if flag == "--allowed-origins" and values[-1].startswith("["):
        try:
            return [str(one) for one in json.loads(values[-1])]
        except ValueError as error:
            raise InvalidArgument(name, f"{values[-1]} is not a JSON list: {error}") from None
    if flag == "--lora-modules":
        return [_convert_adapter(name, one) if one.startswith("{") else one for one in values]
    return list(values)


def _convert_adapter(name: str, text: str) -> str:
    adapter = _parse_object(name, text)
    if not {"name", "path"} <= adapter.keys():
        raise InvalidArgument(name, f"{text} has no name or no path")
    return f"{adapter['name']}={adapter['path']}"


def _parse_object(name: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidArgument(name, f"{text[:60]} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidArgument(name, f"{text[:60]} is not a JSON object")
    return found


def _keys(text: str) -> set[str]:
    """Return the keys of a JSON object; {text} if it is none."""
    try:
        found = json.loads(text)
    except ValueError:
        return {text}
    return set(found) if isinstance(found, dict) else {text}


def _int_or_none(text: str) -> int | None:
    """Return the integer of a text; None if it is none."""
    return int(text) if text.isdecimal() else None
