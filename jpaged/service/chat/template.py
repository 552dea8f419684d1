"""A model's chat template: messages in, text out, within limits of time, memory and size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.errors import InvalidArgument, RequestTooLong
from jpaged.service.chat.frames import Kind
from jpaged.service.chat.process import CPU_S, OutOfTimeError, TemplateProcess

_FIELD = "chat.messages"
_TRIAL = ({"role": "user", "content": "Hello"},)
_TRIAL_BYTES = 1 << 20


class ChatTemplate:
    """A template that is known to work. Safe to call from several threads.

    Args:
        variables: what it may name besides the messages: the special tokens.

    Raises:
        InvalidArgument: it fails on a plain message of a user. One that refuses it, by `raise_exception`, works.
    """

    def __init__(self, process: TemplateProcess, source: str, variables: Mapping[str, Any]) -> None:
        self._process = process
        self._source = source
        self._variables = variables
        try:
            kind, text = process.render(source, variables, _TRIAL, _TRIAL_BYTES)
        except OutOfTimeError:
            kind, text = Kind.OVER, f"{CPU_S} s of processor time"
        if kind in (Kind.FAILED, Kind.OVER, Kind.LONG):
            what = {Kind.FAILED: "fails", Kind.OVER: "passes its limit", Kind.LONG: "makes too many bytes"}[kind]
            raise InvalidArgument("model", f"its chat template {what} on one plain message of a user: {text}")

    def render(self, messages: Sequence[Mapping[str, Any]], *, max_bytes: int) -> str:
        """The conversation, up to where the assistant's turn begins.

        Raises:
            InvalidArgument: the template refuses the messages, in its own words, or cannot cope with them.
            RequestTooLong: more than max_bytes come of them.
            Unavailable: the process that renders is gone.
        """
        try:
            kind, text = self._process.render(self._source, self._variables, messages, max_bytes)
        except OutOfTimeError as error:
            raise InvalidArgument(_FIELD, f"the chat template takes over {CPU_S} s of processor time") from error
        except (TypeError, ValueError) as error:
            raise InvalidArgument(_FIELD, f"hold something that is no text: {error}") from error
        match kind:
            case Kind.RENDERED:
                return text
            case Kind.RAISED:
                raise InvalidArgument(_FIELD, text)
            case Kind.LONG:
                raise RequestTooLong(
                    _FIELD, f"the chat template makes {text} bytes of them, over the limit of {max_bytes}"
                )
            case Kind.OVER:
                raise InvalidArgument(_FIELD, f"the chat template takes over {text}")
        raise InvalidArgument(_FIELD, f"the chat template fails on them: {text}")
