"""Answers with calls in every format, written by hand-made writers that share nothing with the parsers.

`samples` combines calls, arguments, texts around them and endings. Each sample has the outcome that a reader expects.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

SCHEMAS: dict[str, dict[str, Any]] = {
    "find": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "code": {"type": "string"},
            "days": {"type": "integer"},
            "limit": {"type": "number"},
            "is_open": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "place": {"type": "object"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "unit": {"enum": ["C", "F"]},
            "level": {"enum": ["1", 2]},
            "near": {"$ref": "#/$defs/Near"},
        },
        "$defs": {"Near": {"type": "array", "items": {"type": "number"}}},
    },
    "now": {"type": "object", "properties": {}},
}
Arguments = dict[str, Any]
Calls = list[tuple[str, Arguments]]


class Sample(NamedTuple):
    """An answer and what becomes of it. `arguments` are those of each call: parsed, or the text of a cut call."""

    text: str
    content: str = ""
    names: tuple[str, ...] = ()
    arguments: tuple[Arguments | str, ...] = ()


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def text_or_json(value: Any) -> str:
    return value if isinstance(value, str) else dumped(value)


def objects(calls: Calls, key: str = "arguments") -> list[str]:
    return [dumped({"name": name, key: arguments}) for name, arguments in calls]


def hermes(calls: Calls) -> str:
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects(calls))


def qwen3_coder(calls: Calls) -> str:
    written = []
    for name, arguments in calls:
        lines = [f"<parameter={key}>\n{text_or_json(value)}\n</parameter>" for key, value in arguments.items()]
        written.append("\n".join(["<tool_call>", f"<function={name}>", *lines, "</function>", "</tool_call>"]))
    return "\n".join(written)


def glm(calls: Calls, line: str) -> str:
    written = []
    for name, arguments in calls:
        parts = [
            f"<arg_key>{key}</arg_key>{line}<arg_value>{text_or_json(value)}</arg_value>{line}"
            for key, value in arguments.items()
        ]
        written.append(f"<tool_call>{name}{line}{''.join(parts)}</tool_call>")
    return line.join(written)


def invokes(calls: Calls, outer: str, prefix: str, *, is_marked: bool) -> str:
    lines = [f"<{outer}>"]
    for name, arguments in calls:
        lines.append(f'<{prefix}invoke name="{name}">')
        for key, value in arguments.items():
            mark = f' string="{str(isinstance(value, str)).lower()}"' if is_marked else ""
            lines.append(f'<{prefix}parameter name="{key}"{mark}>{text_or_json(value)}</{prefix}parameter>')
        lines.append(f"</{prefix}invoke>")
    return "\n".join([*lines, f"</{outer}>"])


def seed_oss(calls: Calls) -> str:
    written = []
    for name, arguments in calls:
        lines = [f"<parameter={key}>{text_or_json(value)}</parameter>" for key, value in arguments.items()]
        written.append(
            "\n".join(["<seed:tool_call>", f"<function={name}>", *lines, "</function>", "</seed:tool_call>"])
        )
    return "\n".join(written)


BAR, BLOCK = "\uff5c", "\u2581"


def deepseek(calls: Calls, before: str, middle: str, after: str) -> str:
    def token(words: str) -> str:
        return f"<{BAR}{words.replace(' ', BLOCK)}{BAR}>"

    inner = "".join(
        f"{token('tool call begin')}{before and before + token('tool sep')}{name}{middle or token('tool sep')}"
        f"{dumped(arguments)}{after}{token('tool call end')}"
        for name, arguments in calls
    )
    return f"{token('tool calls begin')}{inner}{token('tool calls end')}"


def kimi_k2(calls: Calls) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{dumped(arguments)}<|tool_call_end|>"
        for number, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def python_list(calls: Calls) -> str:
    def literal(value: Any) -> str:
        return dumped(value) if isinstance(value, str) else repr(value)

    def call(name: str, arguments: Arguments) -> str:
        return f"{name}({', '.join(f'{key}={literal(value)}' for key, value in arguments.items())})"

    return f"[{', '.join(call(*one) for one in calls)}]"


def gemma(calls: Calls, tags: tuple[str, str], quote: str) -> str:
    def literal(value: Any) -> str:
        if isinstance(value, str):
            return f"{quote}{value}{quote}"
        if isinstance(value, dict):
            return f"{{{','.join(f'{key}:{literal(inner)}' for key, inner in value.items())}}}"
        return f"[{','.join(map(literal, value))}]" if isinstance(value, list) else dumped(value)

    return "".join(f"{tags[0]}call:{name}{literal(arguments)}{tags[1]}" for name, arguments in calls)


def harmony(calls: Calls) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumped(arguments)}<|call|>"
        for name, arguments in calls
    )


WRITERS: dict[str, Callable[[Calls], str]] = {
    "hermes": hermes,
    "llama3_json": lambda calls: "; ".join(objects(calls, "parameters")),
    "mistral": lambda calls: f"[TOOL_CALLS] [{', '.join(objects(calls))}]",
    "mistral_args": lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{dumped(one)}" for name, one in calls),
    "openai": harmony,
    "granite": lambda calls: f"<|tool_call|>[{', '.join(objects(calls))}]",
    "qwen3_coder": qwen3_coder,
    "glm45": lambda calls: glm(calls, "\n"),
    "glm47": lambda calls: glm(calls, ""),
    "minimax_m2": lambda calls: invokes(calls, "minimax:tool_call", "", is_marked=False),
    "seed_oss": seed_oss,
    "deepseek_v3": lambda calls: deepseek(calls, "function", "\n```json\n", "\n```"),
    "deepseek_v31": lambda calls: deepseek(calls, "", "", ""),
    "deepseek_v32": lambda calls: invokes(calls, f"{BAR}DSML{BAR}function_calls", f"{BAR}DSML{BAR}", is_marked=True),
    "deepseek_v4": lambda calls: invokes(calls, f"{BAR}DSML{BAR}tool_calls", f"{BAR}DSML{BAR}", is_marked=True),
    "kimi_k2": kimi_k2,
    "pythonic": python_list,
    "lfm2": lambda calls: f"<|tool_call_start|>{python_list(calls)}<|tool_call_end|>",
    "functiongemma": lambda calls: gemma(calls, ("<start_function_call>", "<end_function_call>"), "<escape>"),
    "gemma4": lambda calls: gemma(calls, ("<|tool_call>", "<tool_call|>"), '<|"|>'),
}
ONLY_AT_START = ("llama3_json", "pythonic")
"""Formats whose calls come without a tag, so that text before them is all there is."""


def preamble(text: str) -> str:
    """A message of text before a call, as gpt-oss writes it."""
    return text and f"<|channel|>commentary<|message|>{text}<|end|><|start|>assistant"


ARGUMENTS: list[Arguments] = [
    {"city": "Oslo"},
    {"city": "Zürich 東京 \U0001f3d4\ufe0f"},
    {"days": 3, "limit": -0.5, "is_open": True},
    {"tags": ["a", "b c"], "place": {"x": 1, "deep": {"y": [True, None]}}},
    {"note": None, "unit": "F", "is_open": False},
    {"city": "42", "code": "true", "note": "null and void"},
    {"code": 'if a < b and "c" != \'d\':\n    print("[1, 2]", {})\n\treturn \\n'},
    {"city": "", "near": [59.9, 10.75]},
    {"code": "a <b>bold</b> & </tool> (x), y=1; {z: 2}", "days": 0},
]
PARALLEL: list[Calls] = [
    [("find", {"city": "Oslo"}), ("now", {})],
    [("now", {}), ("find", {"days": 1, "city": "Rome"}), ("find", {"city": "東京"})],
    [("find", {"tags": [], "code": "x\ny"}), ("find", {"city": "Bergen", "is_open": True})],
]
AROUND = [
    ("", ""),
    ("Let me look.\n", ""),
    ("", "\nDone."),
    ("Grüße \U0001f600: ", " \u2014 fertig, 7 < 8"),
    ("", "\n\n"),
]
CUT = "Reykjavik"


def samples(name: str) -> Iterator[Sample]:
    """Yield the samples of a format: at least 60."""
    write = WRITERS[name]
    around = [(before, after) for before, after in AROUND if not before or name not in ONLY_AT_START]
    if name == "openai":
        around = [(before, "") for before in ("", "Let me look.\n", "Grüße \U0001f600: ")]
    calls: list[Calls] = [[("find", one)] for one in ARGUMENTS] + [[("now", {})], *PARALLEL]
    calls += [[("find", one), ("find", two)] for one, two in itertools.pairwise(ARGUMENTS)]
    for one in calls:
        names, arguments = tuple(called for called, _ in one), tuple(given for _, given in one)
        for before, after in around:
            text = (preamble(before) if name == "openai" else before) + write(one) + after
            yield Sample(text, before + (after if after.strip() else ""), names, arguments)
    yield from _cut(name, around)
    for text in ("", "Plain text.", "A list: [1, 2], {a}, <b>.", "Ünïcödé \U0001f600", "1 < 2 and f(x)", "  padded  "):
        yield Sample(text, text)
    yield from _alone(name)


def _cut(name: str, around: list[tuple[str, str]]) -> Iterator[Sample]:
    """Yield answers that end within the last call's string."""
    given = {"days": 2, "city": CUT}
    starts: list[Calls] = [[], [("now", {})], [("find", {"city": "Oslo"})]]
    for first in starts:
        calls: Calls = [*first, ("find", given)]
        text = WRITERS[name](calls)
        for before, _ in around[:2]:
            for length in (1, 4, len(CUT)):
                cut = text[: text.rindex(CUT) + length]
                left = dumped(given)[: dumped(given).index(CUT) + length]
                names = tuple(called for called, _ in calls)
                start = preamble(before) if name == "openai" else before
                yield Sample(start + cut, before, names, (*(one for _, one in first), left))


def _alone(name: str) -> Iterator[Sample]:
    """Yield beginnings of a call that end before there is one: they are content."""
    text = WRITERS[name]([("find", {"city": "Oslo"})])
    if name == "openai":
        return
    for end in range(1, text.index("find")):
        yield Sample(f"Well, {text[:end]}", f"Well, {text[:end]}")


class Thought(NamedTuple):
    """An answer with reasoning, and if the prompt has opened the reasoning."""

    text: str
    is_open: bool
    reasoning: str
    content: str


TAGS = {
    "qwen3": ("<think>", "</think>"),
    "deepseek_r1": ("<think>", "</think>"),
    "kimi_k2": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "granite": ("Here is my thought process:", "Here is my response:"),
    "gemma4": ("<|channel>thought", "<channel|>"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "openai_gptoss": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
}
THOUGHTS = ("Hm.", "First.\n\n1. Second \u2014 Ünï\n", "\U0001f914 a < b, c > d", "Call <b> or [x]? </no>", "")
CONTENTS = ("Hello.", "", "Zürich:\n\n7 < 8 \U0001f600", "  - indented")


def thoughts(name: str) -> Iterator[Thought]:
    """Yield the samples of a format of reasoning: at least 60."""
    opening, closing = TAGS[name]
    for thought in THOUGHTS:
        for line in ("", "\n"):
            reasoning, after = thought.strip("\n"), "" if name == "openai_gptoss" else line
            first = "" if name == "openai_gptoss" else line
            for content in CONTENTS:
                whole = f"{first}{reasoning}{first}{closing}{after}{after}{content}"
                yield Thought(f"{opening}{whole}", False, reasoning, content)
                if name != "openai_gptoss":
                    yield Thought(whole, True, reasoning, content)
            yield Thought(f"{opening}{first}{reasoning}", False, reasoning, "")
    for content in (one for one in CONTENTS if name != "openai_gptoss"):
        yield Thought(content, False, "", content)
        yield Thought(f"{opening}\n\n{closing}\n\n{content}", False, "", content)
    for number in range(20 if name == "openai_gptoss" else 0):
        said = f"Part {number} \u2014 \U0001f600"
        yield Thought(f"{opening}a{closing}{said}<|return|>", False, "a", said)
        yield Thought(f"{opening}a<|end|><|start|>assistant{opening}{said}<|end|>", False, f"a\n{said}", "")
