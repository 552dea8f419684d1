"""Renderer of chat templates: `python -m jpaged.service.chat`, the child of `sandbox`, with a socket as its stdin.

Templates run in transformers' environment, so the text equals that of `apply_chat_template`. If a template takes too
much processor time, a system timer ends the whole process; the code here never has to yield.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from jpaged import json_text
from jpaged.service.chat.sandbox import CPU_S, MEMORY_BYTES, FrameKind, receive, send
from jpaged.service.tokenizer_parts import keep_quiet_about_torch


def names(template: str) -> list[str]:
    """Return the variables that a template may look up before it sets them, sorted.

    Raises:
        TemplateSyntaxError: it is not a template, or has tags that transformers' environment lacks.
    """
    from jinja2 import Environment, meta
    from jinja2.ext import Extension

    class Generation(Extension):
        """Parses `{% generation %}`, which transformers adds to jinja, as its content."""

        tags = {"generation"}  # noqa: RUF012 - as jinja declares it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = Environment(extensions=[Generation, "jinja2.ext.loopcontrols"])
    return sorted(meta.find_undeclared_variables(environment.parse(template)))


_MAX_ATTRIBUTES = 4096


def remember_safe_attributes(environment: Any) -> None:
    """Let a class of jinja's sandboxes check each attribute of a type once.

    The check compares types at every access, as in `message.get` and `loop.index`. The types here are those of JSON and
    jinja's own loops and namespaces: their safety depends only on the type and the name of the attribute. Values
    of other types are checked each time.
    """
    from jinja2.runtime import LoopContext
    from jinja2.utils import Namespace

    check, answers = environment.is_safe_attribute, dict[tuple[type, str], bool]()
    kinds = (dict, list, str, int, float, bool, type(None), LoopContext)

    def is_safe_attribute(self: Any, obj: Any, attr: str, value: Any) -> bool:
        kind = type(obj)
        if type(attr) is not str or not (kind in kinds or issubclass(kind, Namespace)):
            return bool(check(self, obj, attr, value))
        is_safe = answers.get((kind, attr))
        if is_safe is None:
            is_safe = bool(check(self, obj, attr, value))
            if len(answers) < _MAX_ATTRIBUTES:
                answers[kind, attr] = is_safe
        return is_safe

    environment.is_safe_attribute = is_safe_attribute


_DICT_ATTRIBUTES = frozenset(dir(dict))
_LOOP_NUMBERS = frozenset({"index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0"})


def read_members_fast(environment: Any) -> None:
    """Let a class of jinja's sandboxes read the commonest members without its checks, with the same results.

    `message.content` is read as a key at once, not after a failed attribute: no dictionary has an attribute of such a
    name. `loop.index` is a number. A template reads about twenty of them for each message.
    """
    from jinja2.runtime import LoopContext

    read = environment.getattr

    def get_member(self: Any, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind is LoopContext and attribute in _LOOP_NUMBERS:
            return getattr(obj, attribute)
        return read(self, obj, attribute)

    environment.getattr = get_member


def keep_plain_values(module: Any) -> None:
    """Let transformers' renderer read the values of a question without a copy: JSON has only plain ones."""
    if hasattr(module, "_plain_template_data"):
        module._plain_template_data = lambda value: value


_MAX_MESSAGE_CHARS = 1000
_STATM = Path("/proc/self/statm")


def main() -> int:
    """Answer questions until the server closes the socket."""
    with socket.socket(fileno=sys.stdin.fileno()) as connection, connection.makefile("rb") as questions:
        keep_quiet_about_torch()
        from jinja2.sandbox import ImmutableSandboxedEnvironment
        from transformers.utils import chat_template_utils

        remember_safe_attributes(ImmutableSandboxedEnvironment)
        read_members_fast(ImmutableSandboxedEnvironment)
        keep_plain_values(chat_template_utils)
        _limit_memory()
        while True:
            try:
                kind, text = receive(questions)
                if kind is FrameKind.TEMPLATE:
                    send(connection, *_limited(partial(_names, text)))
                else:
                    question = json.loads(text) if kind is FrameKind.RARE_QUESTION else orjson.loads(text)
                    send(connection, *_limited(partial(_rendered, chat_template_utils.render_jinja_template, question)))
            except (EOFError, ConnectionError):
                return 0


def _names(template: str) -> tuple[FrameKind, str]:
    return FrameKind.NAMES, json_text.dumps(names(template))


def _rendered(render: Any, question: dict[str, Any]) -> tuple[FrameKind, str]:
    texts, _ = render(
        conversations=[question["messages"]],
        tools=question["tools"],
        chat_template=question["template"],
        **question["layout"],
        **question["variables"],
    )
    num_bytes = len(texts[0].encode())
    return (FrameKind.LONG, str(num_bytes)) if num_bytes > question["max_bytes"] else (FrameKind.RENDERED, texts[0])


def _limited(answer: Callable[[], tuple[FrameKind, str]]) -> tuple[FrameKind, str]:
    from jinja2.exceptions import TemplateError

    signal.setitimer(signal.ITIMER_PROF, CPU_S)  # the signal's default action ends the process
    try:
        return answer()
    except MemoryError:
        return FrameKind.OVER, f"{MEMORY_BYTES >> 20} MiB of memory"
    except Exception as error:  # a template is a program: report any error that it raises
        is_its_own = type(error) is TemplateError
        text = str(error) if is_its_own else f"{type(error).__name__}: {error}"
        # some messages hold unpaired surrogates
        whole = text[:_MAX_MESSAGE_CHARS].encode(errors="backslashreplace").decode()
        return FrameKind.RAISED if is_its_own else FrameKind.FAILED, whole
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def _limit_memory() -> None:
    """Limit the address space, if the system reports its size and accepts a limit."""
    if _STATM.exists():
        used = int(_STATM.read_text().split()[0]) * resource.getpagesize()
        with contextlib.suppress(ValueError, OSError):  # a lower limit that is already set is fine
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))


if __name__ == "__main__":
    sys.exit(main())
