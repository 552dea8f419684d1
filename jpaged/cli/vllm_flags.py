"""Flags of vLLM's `vllm serve`: the table, and the translation of a command line or of a file of options (--config).

`vllm_flags.tsv` has one row per flag:

    flags      all spellings, the first one in dashes; `--no-` and `--disable-` forms of switches, and underscores, are
               accepted too
    kind       switch, value, optional, list or json
    outcome    same         the option exists under this name
               alias        the option has another name, which is logged
               unnecessary  dropped and logged, because it cannot change a result
               unsupported  an error with the reason, except with `values` or in its `--no-` form
    option     the option of an alias; `!` inverts a switch; of others the nearest one
    values     same: GIVEN=OURS, an empty OURS drops the flag; unsupported: values, or keys of JSON, without an effect
    reason     reason, or difference
    version    version of vLLM in which the flag was read, or `older`

`vllm_variables.tsv` has the environment variables of vLLM in the same way: names or patterns with `*`, of which the
first that matches counts, and the outcomes alias, unnecessary and unsupported.
"""

from __future__ import annotations

import argparse
import difflib
import fnmatch
import functools
import json
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, get_args

from jpaged import json_text
from jpaged.cli.options import add_config_flags, config_values, merge_json_flags, split_json_flags, to_flag
from jpaged.config import iter_options
from jpaged.config.option import is_json
from jpaged.errors import InvalidArgument, describe_error

TABLE = Path(__file__).with_suffix(".tsv")
VARIABLES = TABLE.with_name("vllm_variables.tsv")
VERSION = "0.33"
"""Version of vLLM whose flags the table has completely."""
Outcome = Literal["same", "alias", "unnecessary", "unsupported"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
_NUMBER = re.compile(r"-\d+|-\d*\.\d+")
_COORDINATOR = {"--master-addr": "127.0.0.1", "--master-port": "29501", "--nnodes": "1", "--node-rank": "0"}
"""Flags of several hosts and vLLM's defaults."""
_OFF = ("", "0", "false", "none")
"""Values of environment variables that turn a feature off, in lower case."""
_EXCLUDED_BY = {"--api-key": "--api-keys"}
"""Options that replace a variable in addition to its own."""
_FURTHER = {"--served-model-name": "--served-model-aliases"}
"""Options for the second and later values of a list."""
_EVENTS = {
    "endpoint": "--kv-events-endpoint",
    "replay_endpoint": "--kv-events-replay-endpoint",
    "topic": "--kv-events-topic",
    "buffer_steps": "--kv-events-buffer",
}
_EVENTS_FLAG = "--kv-events-config"
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


_INVERSES = {"--no-": "--", "--disable-": "--enable-", "--enable-": "--disable-"}
"""Prefixes of a switch's negative form, and of the switch."""


def find_flag(word: str) -> VllmFlag | None:
    """Return the row of a spelling in dashes, or of a switch's negative form; None if vLLM has no such flag."""
    rows = _by_name()
    found = rows.get(word)
    for prefix, positive in _INVERSES.items():
        if found is None and word.startswith(prefix):
            switch = rows.get(positive + word.removeprefix(prefix))
            found = switch if switch is not None and switch.kind == "switch" else None
    return found


class VllmVariable(NamedTuple):
    """A row of the table of environment variables."""

    names: tuple[str, ...]
    outcome: Outcome
    option: str
    reason: str
    version: str


@functools.cache
def read_variables() -> tuple[VllmVariable, ...]:
    """Return the rows of the table of environment variables."""
    rows = (line.split("\t") for line in VARIABLES.read_text(encoding="utf-8").splitlines()[1:])
    return tuple(
        VllmVariable(tuple(names.split()), OUTCOMES[OUTCOMES.index(outcome)], *rest) for names, outcome, *rest in rows
    )


def find_variable(name: str) -> VllmVariable | None:
    """Return the row of an environment variable: its own, or that of the first pattern; None if there is none."""
    rows = read_variables()
    own = next((row for row in rows if name in row.names), None)
    return own or next((row for row in rows if any(fnmatch.fnmatchcase(name, one) for one in row.names)), None)


def describe_variables(variables: Mapping[str, str]) -> list[str]:
    """Return a line for each reason for which environment variables of vLLM are not read, and one for unknown ones.

    Variables that become options, and those that turn an unsupported feature off, are left out.
    """
    groups: dict[VllmVariable | None, list[str]] = {}
    for name, value in sorted(variables.items()):
        row = find_variable(name)
        is_off = row is not None and row.outcome == "unsupported" and value.strip().lower() in _OFF
        if not is_off and (row is None or row.outcome != "alias"):
            groups.setdefault(row, []).append(name)
    notes = []
    for row, names in groups.items():
        if row is None:
            known = [name for one in read_variables() for name in one.names]
            similar = [match for name in names for match in difflib.get_close_matches(name, known, 1, 0.8)]
            hint = f"; did you mean {', '.join(dict.fromkeys(similar))}?" if similar else ""
            notes.append(f"not read, and no variables of vLLM {VERSION}: {', '.join(names)}{hint}")
        elif row.outcome == "unsupported":
            nearest = f"; use {row.option}" if row.option else ""
            notes.append(f"{', '.join(names)}: not read: {row.reason}{nearest}")
        else:
            notes.append(f"{', '.join(names)}: no effect: {row.reason}")
    return notes


def _words_of_variables(
    parser: argparse.ArgumentParser, variables: Mapping[str, str], options: set[str]
) -> tuple[list[str], list[str]]:
    """Return the options that environment variables set, unless they are set otherwise, and a line for each."""
    words, notes, native = list[str](), list[str](), parser._option_string_actions
    for name, value in sorted(variables.items()):
        row = find_variable(name)
        if row is None or row.outcome != "alias" or row.option not in native or not value.strip():
            continue
        others = [native[one].dest for one in (row.option, _EXCLUDED_BY.get(row.option, row.option))]
        if options.isdisjoint(others):
            words.append(f"{row.option}={value.strip()}")
            notes.append(f"{name} is {row.option} here")
    return words, notes


def translate(
    parser: argparse.ArgumentParser, words: Sequence[str], variables: Mapping[str, str] | None = None
) -> tuple[list[str], list[str]]:
    """Replace vLLM's flags by the options of a command, and --config by the options in the file.

    Args:
        variables: environment variables of vLLM; options of the command line and of the file override them.

    Returns:
        The words for the parser, and a line for each flag that was replaced or dropped, and for variables.

    Raises:
        InvalidArgument: a flag has no value, or would need what jpaged does not have; names it and the reason.
    """
    translation = _Translation(parser, words)
    translation.run()
    found, notes = _with_file(parser, translation)
    further, of_variables = _words_of_variables(parser, variables or {}, translation.options(found))
    notes += [*of_variables, *describe_variables(variables or {})]
    return [*further, *found], list(dict.fromkeys(notes))


def _with_file(parser: argparse.ArgumentParser, translation: _Translation) -> tuple[list[str], list[str]]:
    """Return the words of a command line with its file of options, and the lines about both."""
    if translation.config_file is None:
        return translation.finish(), translation.notes
    path, left_out = Path(translation.config_file), list[str]()
    try:
        filed = _Translation(parser, (), is_file=True)
        for key, option_words in _words_of_file(parser, path, left_out):
            filed.add(key, option_words)
        translation.take_hosts(filed)
        of_file = filed.finish()
        _check_values(parser, of_file)
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}: {error.field}", error.problem) from None
    own = translation.finish(filed.json_keys)
    notes = [*translation.notes, *(f"{path}: {note}" for note in (*left_out, *filed.notes))]
    return [*_without(parser, of_file, translation.options(own)), *own], notes


_Values = str | int | float | bool | list[Any] | dict[str, Any] | None


def _words_of_file(parser: argparse.ArgumentParser, path: Path, notes: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the keys of a YAML file with their options as words of a command line, in the order of the file.

    Keys are names of options or flags of vLLM, without the first dashes. Options of other commands are left out, so
    that commands can share a file.

    Args:
        notes: gets a line for each option that is left out.

    Raises:
        InvalidArgument: the file cannot be read, or has an unknown key or a value that its option does not take.
    """
    import yaml  # takes 20 ms to import

    try:
        text = path.read_text(encoding="utf-8")
        values, tree = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        problem = describe_error(error) if isinstance(error, OSError) else f"is not YAML: {error}"
        raise InvalidArgument("--config", problem) from None
    if values is None:
        return
    if not isinstance(values, dict):
        raise InvalidArgument("--config", "is not a YAML mapping of options, such as `max-model-len: 4096`")
    texts, spellings = dict[str, Any](), dict[str, str]()
    for node, content in tree.value:  # a mapping has only the last of equal keys
        if node.tag == "tag:yaml.org,2002:merge":
            raise InvalidArgument("<<", "merge keys of YAML are not supported: write the options themselves")
        name = _name_of_key(node.value)
        if (first := spellings.setdefault(name, node.value)) != node.value or name in texts:
            problem = "is given twice" if first == node.value else f"is given twice, also as {node.value}"
            raise InvalidArgument(first, problem)
        texts[name] = _as_written(content)
    for key, value in values.items():
        name = _name_of_key(key)
        if _is_known(parser, name.partition(".")[0], str(key)):
            yield str(key), _option_words(parser, str(key), name, value, texts.get(name, value))
        else:
            notes.append(f"{name} is not an option of `{parser.prog}`")


def _as_written(node: Any) -> Any:
    """Return a scalar as it is written in a file, or a list of the scalars in a sequence; None for other nodes."""
    if node.id == "sequence":
        return [item.value if item.id == "scalar" else None for item in node.value]
    return node.value if node.id == "scalar" else None


def _name_of_key(key: object) -> str:
    base, dot, inner = str(key).partition(".")
    return f"--{base.replace('_', '-')}{dot}{inner}"


def _is_known(parser: argparse.ArgumentParser, name: str, key: str) -> bool:
    """Return True if a flag in a file is one of this command, False if it is one of another command.

    Raises:
        InvalidArgument: there is no such flag, or it is one of the command line only.
    """
    native, flag = parser._option_string_actions, find_flag(name)
    if name in ("--config", "--help"):
        raise InvalidArgument(key, "is an option of the command line only")
    if name in native or (flag is not None and flag.outcome not in ("same", "alias")):
        return True
    options = {to_flag(option) for option, _, _ in iter_options()}
    if flag is not None:
        return (flag.name if flag.outcome == "same" else flag.option.lstrip("!").partition(".")[0]) in native
    if name in options or f"--{name.removeprefix('--no-')}" in options:
        return False
    hint = suggest(parser, [name], has_vllm_flags=True)
    raise InvalidArgument(key, "; ".join(filter(None, ("is not an option", hint))))


def _option_words(parser: argparse.ArgumentParser, key: str, name: str, value: _Values, text: Any) -> list[str]:
    """Return the words for a key of a file.

    Args:
        text: a number or a date as it is written, or the items of a list: digits of an API key or a revision stay.
    """
    flag, action = find_flag(name.partition(".")[0]), parser._option_string_actions.get(name)
    is_switch = action.nargs == 0 if action is not None else flag is not None and flag.kind == "switch"
    is_list = isinstance(action, argparse._AppendAction) or (flag is not None and flag.kind == "list")
    if "." in name:  # a key of a JSON object
        base = name.partition(".")[0]
        if not _takes_keys(base):
            raise InvalidArgument(key, f"is not an option: the value of {base} is not a JSON object")
        return [f"{name}={value if isinstance(value, str) else _to_json(key, value)}"]
    if value is None:
        return []
    if is_switch:
        if not isinstance(value, bool):
            raise InvalidArgument(key, f"{value!r} is not true or false")
        is_negative = name.startswith("--no-") or (flag is not None and name not in flag.names)
        positive = flag.name if flag is not None and is_negative else f"--{name.removeprefix('--no-')}"
        return [name if value else positive if is_negative else f"--no-{name.removeprefix('--')}"]
    if isinstance(value, bool):
        if flag is not None and flag.kind == "optional":
            return [name] if value else []
        raise InvalidArgument(key, f"takes a value; {'true' if value else 'false'} is none")
    if isinstance(value, list) and is_list:
        if None in value:
            raise InvalidArgument(key, "has an item without a value")
        texts = [
            _to_json(key, one) if isinstance(one, dict | list) else str(written)
            for one, written in zip(value, text, strict=True)
        ]
        if flag is not None and flag.kind == "list":
            return [name, *texts] if texts else []
        return [f"{name}={one}" for one in texts]
    if isinstance(value, dict | list | set | bytes):
        return [f"{name}={_to_json(key, value)}"]
    return [f"{name}={value if isinstance(value, str) else text}"]


def _takes_keys(name: str) -> bool:
    """Return True if keys of a flag's value can be given singly, as in `--speculative-config.method`."""
    flag, target = find_flag(name), name
    if flag is not None and flag.outcome not in ("same", "alias"):
        return True
    if flag is not None and flag.outcome == "alias":
        target = flag.option.lstrip("!").partition(".")[0]
    is_object = any(to_flag(option) == target and is_json(spec) for option, _, spec in iter_options())
    return is_object or (flag is not None and flag.name == _EVENTS_FLAG)


def _to_json(key: str, value: object) -> str:
    """Return a value of a file as JSON.

    Raises:
        InvalidArgument: it has a date, a set, a number that is not finite, or itself.
    """
    try:
        return json_text.dumps_finite(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(key, f"is not JSON: {error}") from None


def _groups(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[list[str]]:
    """Split words into one list per option, with its values."""
    found: list[list[str]] = []
    for word in words:
        if word.partition("=")[0] in parser._option_string_actions or not found:
            found.append([])
        found[-1].append(word)
    return found


def _without(parser: argparse.ArgumentParser, words: Sequence[str], options: set[str]) -> list[str]:
    """Return the words of a file except those of options that the command line sets."""
    actions = parser._option_string_actions
    kept = [group for group in _groups(parser, words) if actions[group[0].partition("=")[0]].dest not in options]
    return [word for group in kept for word in group]


def _check_values(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Raise InvalidArgument if a value in a file has the wrong type."""
    for group in _groups(parser, words):
        name, equals, value = group[0].partition("=")
        action = parser._option_string_actions[name]
        if action.nargs != 0:
            try:
                parser._check_value(action, parser._get_value(action, value if equals else group[1]))
            except argparse.ArgumentError as error:
                raise InvalidArgument(name.removeprefix("--"), error.message) from None


_OFFLINE = ("model", "cache", "lossy", "scheduler", "parallel", "lora", "media", "startup", "timeouts")
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
    flags = {name: find_flag(to_flag(name)) for name in given}
    # Objects that another argument adds a key to, as rope_theta does to hf_overrides, are joined by the parser.
    joined = {flag.option.partition(".")[0] for flag in flags.values() if flag is not None and "." in flag.option}
    for name, value in given.items():
        flag = flags[name]
        is_joined = to_flag(name) in joined and isinstance(value, Mapping)
        if flag is None or (
            name in known and not is_joined and not any(one.startswith(f"{value}=") for one in flag.values)
        ):
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
    found, aliases = [], [name for name, option in known.items() if name != option]
    for word in words:
        name = word.partition("=")[0]
        if not name.startswith("--"):
            continue
        short = find_flag(name[1:]) if has_vllm_flags else None  # --tp for -tp
        longer = [one for one in (*parser._option_string_actions, *aliases) if len(name) > 5 and one.startswith(name)]
        if short is not None:
            found.append(short.name)
        else:
            found += difflib.get_close_matches(name, longer or known, 1, 0 if longer else 0.7)
    named = dict.fromkeys(known.get(one, one) for one in found)
    return f"did you mean {', '.join(named)}?" if named else ""


class _Translation:
    """The command line of one command, or the words of a file, one by one."""

    def __init__(self, parser: argparse.ArgumentParser, words: Sequence[str], *, is_file: bool = False) -> None:
        self.notes: list[str] = []
        self.config_file: str | None = None
        self._native: dict[str, argparse.Action] = parser._option_string_actions
        self._left = deque(words)
        self._rest: list[str] = []
        self._out: list[str] = []
        self._hosts: dict[str, str] = {}
        self._has_keys = False
        self._keys_of_options: dict[str, str] = {}
        self._has_model = is_file  # a list in a file ends with its key

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

    def add(self, key: str, words: Sequence[str]) -> None:
        """Translate the words for a key of a file.

        Raises:
            InvalidArgument: the key sets an option that another key has set; names both.
        """
        num_words, hosts = len(self._out), set(self._hosts)
        self._left.extend(words)
        self.run()
        names = {word.partition("=")[0] for word in self._out[num_words:]}
        options = {self._native[name].dest if name in self._native else name for name in names if self._is_option(name)}
        for option in sorted(options | (set(self._hosts) - hosts)):
            if (first := self._keys_of_options.setdefault(option, key)) != key:
                raise InvalidArgument(key, f"sets the same option as {first}: give only one of them")
        for host in self._hosts:
            other = self._keys_of_options.get(self._native[_by_name()[host].option].dest)
            if other is not None:
                problem = f"sets the same option as {self._keys_of_options[host]}: give only one of them"
                raise InvalidArgument(other, problem)

    def _is_option(self, name: str) -> bool:
        return name.partition(".")[0] in self._native

    @property
    def json_keys(self) -> dict[str, dict[str, Any]]:
        """The keys of JSON options that were given singly, by flag."""
        return split_json_flags(self._out)[1] if self._has_keys else {}

    def take_hosts(self, other: _Translation) -> None:
        """Take the flags of several hosts from a file; those of the command line come first."""
        self._hosts = {**other._hosts, **self._hosts}
        other._hosts = {}

    def options(self, words: Sequence[str]) -> set[str]:
        """Return the parser's names of the options in translated words."""
        names = {word.partition("=")[0] for word in words}
        names |= {further for name, further in _FURTHER.items() if name in names}
        found = {self._native[name].dest for name in names if name in self._native}
        return found | ({"config_model"} if self._has_model or self._rest[1:] else set())

    def finish(self, json_keys: Mapping[str, Mapping[str, Any]] | None = None) -> list[str]:
        """Return the words for the parser.

        Args:
            json_keys: keys of JSON options in a file, which are kept if further ones are given singly.
        """
        if _int_or_none(self._hosts.get("--nnodes", "1")) == 1:
            self._hosts.clear()
        if self._hosts:
            hosts = {**_COORDINATOR, **self._hosts}
            self._out += ["--coordinator", f"{hosts['--master-addr']}:{hosts['--master-port']}"]
            self._out += ["--num-processes", hosts["--nnodes"], "--process-id", hosts["--node-rank"]]
        if self.notes and self._is_given("--port") and not self._is_given("--http-port"):
            self.notes.append("--port is the gRPC port; the OpenAI API has its own (--http-port, 8000 by default)")
        words = [*self._out, *self._rest]
        return merge_json_flags(words, json_keys) if self._has_keys else words

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
        if name == "--config" and name in self._native:
            if not equals and not self._has_value():
                raise InvalidArgument(name, "has no value; it takes a YAML file of options")
            if self.config_file is not None:
                raise InvalidArgument(name, "is given twice")
            self.config_file = value if equals else self._left.popleft()
            return
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
            is_off = (name not in flag.names) != option.startswith("!")
            given = f"--no-{target.removeprefix('--')}" if is_off else target
            self._out.append(f"{given}{equals}{value}")
            self._note(name, given)
            return
        values = self._take(flag, name, equals, value) if flag.outcome == "alias" or key else []
        if flag.name == _EVENTS_FLAG:
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
                if flag.kind == "optional":
                    self.notes.append(f"{name} has no effect: {flag.reason}")
                else:
                    self._out.append(flag.name)  # the parser reports it
                return
            value = self._left.popleft()
        values = dict(pair.split("=") for pair in flag.values)
        ours = values.get(value, values.get(value.upper(), value))  # vLLM's backends may be in lower case
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
            given = {key.partition(".")[0]: values[-1]} if key else _items(values[-1])
            is_off = all({one, f"{one}={value}"} & set(flag.values) for one, value in given.items())
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


def _items(text: str) -> dict[str, Any]:
    """Return the keys of a JSON object with their values; the text as a key if it is none."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {text: ""}


def _int_or_none(text: str) -> int | None:
    """Return the integer of a text; None if it is none."""
    return int(text) if text.isdecimal() else None
