"""Converts EBNF, in the dialects of llama.cpp's GBNF and xgrammar, to llguidance's Lark.

    root  ::= "[" items? "]"          start: "[" r_items? "]"
    items ::= [0-9]+ ("," items)?     r_items: /[0-9]/+ ...

Syntax: https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md. Line ends only end comments, as in
xgrammar. Rules that are not recursive become terminals, which match as regular expressions do; adjacent terminals are
merged into one. A terminal is greedy, so a recursive rule cannot return characters to what follows it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from jpaged import json_text

MAX_DEPTH = 100
"""Maximum nesting of brackets."""
MAX_REPEATS = 1 << 16
_SPACE = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*|[0-9][A-Za-z0-9_.-]*(?=\s*::=)")
_COUNT = re.compile(r"\{\s*(\d+)\s*(?:(,)\s*(\d*)\s*)?\}")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "b": "\b", "a": "\a", "v": "\v", "0": "\0", "e": "\x1b"}
_HEX = {"x": 2, "u": 4, "U": 8}


class EbnfError(ValueError):
    """Invalid grammar; the message has the line and column, from 1."""

    def __init__(self, text: str, position: int, problem: str) -> None:
        line = text.count("\n", 0, position) + 1
        column = position - (text.rfind("\n", 0, position) + 1) + 1
        super().__init__(f"line {line}, column {column}: {problem}")


@dataclass(frozen=True, slots=True)
class _Literal:
    text: str


@dataclass(frozen=True, slots=True)
class _Class:
    """A character class: a Rust regex that matches one character."""

    regex: str


@dataclass(frozen=True, slots=True)
class _Reference:
    name: str
    position: int


@dataclass(frozen=True, slots=True)
class _Repeat:
    node: _Node
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class _Sequence:
    nodes: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    nodes: tuple[_Node, ...]


_Node = _Literal | _Class | _Reference | _Repeat | _Sequence | _Choice


def is_ebnf(text: str) -> bool:
    """Return True if a grammar defines rules with `::=` outside comments, so that it is not Lark."""
    return any("::=" in re.sub(r"(#|//).*$", "", line) for line in text.split("\n"))


def to_lark(text: str, *, prefix: str = "") -> str:
    """Convert an EBNF grammar to rules of Lark.

    Args:
        prefix: prefix of every name, so that rules of several grammars can be combined; the grammar's root is the rule
            `<prefix>start`.

    Raises:
        EbnfError: names the position.
    """
    rules = _Parser(text).rules()
    if "root" not in rules:
        raise EbnfError(text, 0, "there is no rule named root")
    return _Writer(text, rules, prefix).lark()


@dataclass(slots=True)
class _Parser:
    text: str
    position: int = 0
    depth: int = 0

    def rules(self) -> dict[str, _Node]:
        found: dict[str, _Node] = {}
        self._skip()
        while self.position < len(self.text):
            start = self.position
            name = self._match(_NAME, "a rule name is expected")
            self._skip()
            self._expect("::=")
            if name in found:
                raise EbnfError(self.text, start, f"rule {name!r} is defined twice")
            found[name] = self._choice()
            if self.position < len(self.text) and not self._is_at_rule():
                raise self._wrong(f"{self.text[self.position]!r} is not expected here")
        return found

    def _choice(self) -> _Node:
        self._skip()
        nodes = [self._sequence()]
        while self._take("|"):
            nodes.append(self._sequence())
        return nodes[0] if len(nodes) == 1 else _Choice(tuple(nodes))

    def _sequence(self) -> _Node:
        nodes: list[_Node] = []
        while (node := self._element()) is not None:
            nodes.append(node)
        return nodes[0] if len(nodes) == 1 else _Sequence(tuple(nodes))

    def _element(self) -> _Node | None:
        self._skip()
        letter = self.text[self.position : self.position + 1]
        node: _Node
        if letter in ('"', "'"):
            node = self._literal(letter)
        elif letter == "[":
            node = self._class()
        elif letter == "(":
            node = self._group()
        elif letter == ".":
            self.position += 1
            node = _Class("(?s:.)")
        elif _NAME.match(self.text, self.position) and not self._is_at_rule():
            node = _Reference(self._match(_NAME, ""), self.position)
        else:
            return None
        return self._repeated(node)

    def _group(self) -> _Node:
        start = self.position
        if self.text.startswith("(=", start):
            raise self._wrong("lookahead (= ...) is not supported")
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self._wrong(f"brackets are nested more than {MAX_DEPTH} levels deep")
        self.position += 1
        node = self._choice()
        if not self._take(")"):
            raise EbnfError(self.text, start, "this bracket is never closed")
        self.depth -= 1
        return node

    def _repeated(self, node: _Node) -> _Node:
        while True:
            self._skip()
            letter = self.text[self.position : self.position + 1]
            if letter in ("*", "+", "?") and letter:
                self.position += 1
                node = _Repeat(node, int(letter == "+"), 1 if letter == "?" else None)
            elif letter == "{":
                node = self._counted(node)
            else:
                return node

    def _counted(self, node: _Node) -> _Node:
        found = _COUNT.match(self.text, self.position)
        if found is None:
            raise self._wrong("a count must be {n}, {n,} or {n,m}")
        low = _number(found[1])
        high = low if found[2] is None else _number(found[3]) if found[3] else None
        if max(low, high or 0) > MAX_REPEATS:
            raise self._wrong(f"a count is over the limit of {MAX_REPEATS}")
        if high is not None and high < low:
            raise self._wrong(f"the maximum of a count is below its minimum: {found[0]}")
        self.position = found.end()
        return _Repeat(node, low, high)

    def _literal(self, quote: str) -> _Node:
        start, letters = self.position, []
        self.position += 1
        while not self.text.startswith(quote, self.position):
            letters.append(self._letter(start, "this string is never closed"))
        self.position += 1
        return _Literal("".join(letters))

    def _class(self) -> _Node:
        start = self.position
        self.position += 1
        is_negated = self.text.startswith("^", self.position)
        self.position += is_negated
        parts: list[str] = []
        while not self.text.startswith("]", self.position):
            at = self.position
            low = high = self._letter(start, "this character class is never closed")
            if self.text.startswith("-", self.position) and not self.text.startswith("-]", self.position):
                self.position += 1
                high = self._letter(start, "this character class is never closed")
            if high < low:
                raise EbnfError(self.text, at, f"a range is reversed: {low!r} to {high!r}")
            parts.append(_code(low) if low == high else f"{_code(low)}-{_code(high)}")
        self.position += 1
        if not parts:
            if is_negated:
                return _Class("(?s:.)")
            raise EbnfError(self.text, start, "this character class is empty")
        return _Class(f"[{'^' if is_negated else ''}{''.join(parts)}]")

    def _letter(self, start: int, problem: str) -> str:
        """Read one character of a literal or a class, and decode an escape."""
        if self.position >= len(self.text):
            raise EbnfError(self.text, start, problem)
        at, letter = self.position, self.text[self.position]
        self.position += 1
        if letter != "\\":
            return letter
        kind = self.text[self.position : self.position + 1]
        self.position += 1
        if kind not in _HEX:
            if kind.isalnum() and kind not in _ESCAPES:
                raise EbnfError(self.text, at, f"unknown escape \\{kind}")
            return _ESCAPES.get(kind, kind)
        digits = self.text[self.position : self.position + _HEX[kind]]
        if not re.fullmatch(f"[0-9A-Fa-f]{{{_HEX[kind]}}}", digits):
            raise EbnfError(self.text, at, f"\\{kind} requires {_HEX[kind]} hexadecimal digits")
        self.position += _HEX[kind]
        code = int(digits, 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise EbnfError(self.text, at, f"\\{kind}{digits} is not a character")
        return chr(code)

    def _is_at_rule(self) -> bool:
        found = _NAME.match(self.text, self.position)
        return found is not None and self.text.startswith("::=", _end(_SPACE, self.text, found.end()))

    def _skip(self) -> None:
        self.position = _end(_SPACE, self.text, self.position)

    def _take(self, letter: str) -> bool:
        self._skip()
        is_there = self.text.startswith(letter, self.position)
        self.position += len(letter) * is_there
        return is_there

    def _expect(self, text: str) -> None:
        if not self._take(text):
            raise self._wrong(f"{text} is expected")

    def _match(self, pattern: re.Pattern[str], problem: str) -> str:
        found = pattern.match(self.text, self.position)
        if found is None:
            raise self._wrong(problem)
        self.position = found.end()
        return found[0]

    def _wrong(self, problem: str) -> EbnfError:
        return EbnfError(self.text, self.position, problem)


def _end(pattern: re.Pattern[str], text: str, position: int) -> int:
    found = pattern.match(text, position)
    return position if found is None else found.end()


def _number(digits: str) -> int:
    return int(digits) if len(digits) < 10 else MAX_REPEATS + 1


def _code(letter: str) -> str:
    return letter if letter.isascii() and letter.isalnum() else f"\\x{{{ord(letter):X}}}"


@dataclass(slots=True)
class _Writer:
    text: str
    rules: dict[str, _Node]
    prefix: str
    lines: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    terminals: set[str] = field(default_factory=set)

    def lark(self) -> str:
        self._check_references()
        self.terminals = _terminals(self.rules)
        for index, name in enumerate(self.rules):
            self.names[name] = f"{self.prefix}R{index}".upper() if name in self.terminals else f"{self.prefix}r{index}"
        self.lines = [f"{self.prefix}start: {self.names['root']}"]
        for name, node in self.rules.items():
            # The library drops unreachable rules.
            body = self._written(node) if name in self.terminals else self._rule_body(node)
            self.lines.append(f"{self.names[name]}: {body}")
        return "\n".join(self.lines) + "\n"

    def _check_references(self) -> None:
        for node in self.rules.values():
            for reference in _references(node):
                if reference.name not in self.rules:
                    start = reference.position - len(reference.name)
                    raise EbnfError(self.text, start, f"there is no rule named {reference.name!r}")

    def _rule_body(self, node: _Node) -> str:
        """Return the body of a rule that is not a terminal; runs of terminals in its sequences are merged."""
        if self._is_terminal(node):
            return self._as_terminal(node)
        match node:
            case _Choice(nodes):
                return "(" + " | ".join(self._rule_body(one) for one in nodes) + ")"
            case _Sequence(nodes):
                return self._runs(nodes)
            case _Repeat(inner, low, high):
                return f"({self._rule_body(inner)}){_suffix(low, high)}"
        return self._written(node)

    def _runs(self, nodes: tuple[_Node, ...]) -> str:
        parts: list[str] = []
        run: list[_Node] = []
        for node in nodes:
            if self._is_terminal(node):
                run.append(node)
                continue
            if run:
                parts.append(self._as_terminal(_Sequence(tuple(run))))
                run = []
            parts.append(f"({self._rule_body(node)})")
        if run:
            parts.append(self._as_terminal(_Sequence(tuple(run))))
        return " ".join(parts)

    def _as_terminal(self, node: _Node) -> str:
        if isinstance(node, _Sequence) and len(node.nodes) == 1:
            node = node.nodes[0]
        if isinstance(node, _Literal | _Class | _Reference):
            return self._written(node)
        name = f"{self.prefix}T{len(self.lines)}".upper()
        self.lines.append(f"{name}: {self._written(node)}")
        return name

    def _is_terminal(self, node: _Node) -> bool:
        return all(reference.name in self.terminals for reference in _references(node))

    def _written(self, node: _Node) -> str:
        match node:
            case _Literal(text):
                return json_text.dumps(text, ensure_ascii=False)
            case _Class(regex):
                return f"/{regex}/"
            case _Reference(name):
                return self.names[name]
            case _Repeat(inner, low, high):
                return f"({self._written(inner)}){_suffix(low, high)}"
            case _Sequence(nodes):
                return " ".join(f"({self._written(one)})" for one in nodes) or '""'
            case _Choice(nodes):
                return "(" + " | ".join(self._written(one) for one in nodes) + ")"


def _suffix(low: int, high: int | None) -> str:
    if (low, high) in ((0, None), (1, None), (0, 1)):
        return "*" if (low, high) == (0, None) else "+" if high is None else "?"
    return f"{{{low},{'' if high is None else high}}}"


def _references(node: _Node) -> list[_Reference]:
    found: list[_Reference] = []
    left = [node]
    while left:
        match left.pop():
            case _Reference() as one:
                found.append(one)
            case _Repeat(inner):
                left.append(inner)
            case _Sequence(nodes) | _Choice(nodes):
                left.extend(nodes)
    return found


def _terminals(rules: dict[str, _Node]) -> set[str]:
    """Return the rules that are not recursive, directly or indirectly."""
    needs = {name: {one.name for one in _references(node)} for name, node in rules.items()}
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, used in needs.items():
        for one in used:
            users[one].append(name)
    open_needs = {name: len(used) for name, used in needs.items()}
    ready = [name for name, count in open_needs.items() if count == 0]
    found: set[str] = set()
    while ready:
        name = ready.pop()
        found.add(name)
        for user in users[name]:
            open_needs[user] -= 1
            if open_needs[user] == 0:
                ready.append(user)
    return found
