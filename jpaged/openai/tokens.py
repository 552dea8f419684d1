"""Bodies of /tokenize and /detokenize, and their response bodies. No I/O.

    /tokenize    {"prompt": text, "add_special_tokens": true}   -> the ids of a text
    /tokenize    {"messages": [...], "tools": [...]}            -> the ids of a chat, up to the assistant's turn
    /detokenize  {"tokens": [...]}                              -> their text

Both are vLLM's (https://docs.vllm.ai/en/v0.9.0/serving/openai_compatible_server.html).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jpaged.errors import InvalidArgument
from jpaged.openai.bodies import name_in
from jpaged.openai.chats import CHAT_FIELDS, chat_options_in, messages_in
from jpaged.openai.neutral_fields import own_fields
from jpaged.types import Prompt

_OF_TEXTS = {"model", "prompt", "add_special_tokens", "return_token_strs"}
_ONLY_OF_CHATS = {"add_special_tokens": False}
"""Fields of a chat that must have this value: the chat template writes the special tokens."""
_OF_CHATS = {*CHAT_FIELDS, *_ONLY_OF_CHATS}


@dataclass(frozen=True, slots=True)
class TokenizeJob:
    """A text or a chat to tokenize.

    Attributes:
        wants_texts: also return the text of each token.
    """

    prompt: Prompt
    add_special_tokens: bool = True
    wants_texts: bool = False
    model: str | None = None


@dataclass(frozen=True, slots=True)
class DetokenizeJob:
    """Token ids to detokenize."""

    token_ids: tuple[int, ...]
    skip_special_tokens: bool = False
    model: str | None = None


def tokenize_job_of(given: Mapping[str, Any]) -> TokenizeJob:
    """Parse a body of /tokenize.

    Raises:
        InvalidArgument: a field is unknown, invalid, or cannot be honored.
    """
    if (given.get("prompt") is None) == (given.get("messages") is None):
        raise InvalidArgument("prompt", "give exactly one of prompt and messages")
    is_text = given.get("prompt") is not None
    body = own_fields("/tokenize", given, _OF_TEXTS if is_text else {"model", "return_token_strs", *_OF_CHATS})
    wants_texts, model = _flag(body, "return_token_strs", default=False), name_in(body, "model")
    if is_text:
        if not isinstance(body["prompt"], str):
            raise InvalidArgument("prompt", f"{str(body['prompt'])[:80]!r} is not a string")
        adds = _flag(body, "add_special_tokens", default=True)
        return TokenizeJob(Prompt(text=body["prompt"]), adds, wants_texts, model)
    for name, only in _ONLY_OF_CHATS.items():
        if _flag(body, name, default=only) is not only:
            raise InvalidArgument(name, f"must be {str(only).lower()} for a chat")
    prompt = Prompt(messages=messages_in(body), chat_options=chat_options_in(body))
    return TokenizeJob(prompt, wants_texts=wants_texts, model=model)


def tokenized_body(token_ids: Sequence[int], texts: Sequence[str] | None, *, max_model_len: int) -> dict[str, Any]:
    """Return the response to a TokenizeJob."""
    told = None if texts is None else list(texts)
    return {"count": len(token_ids), "max_model_len": max_model_len, "tokens": list(token_ids), "token_strs": told}


def detokenize_job_of(given: Mapping[str, Any]) -> DetokenizeJob:
    """Parse a body of /detokenize; raise as `tokenize_job_of` does."""
    body = own_fields("/detokenize", given, {"model", "tokens", "skip_special_tokens"})
    token_ids = body.get("tokens")
    if not isinstance(token_ids, list) or not all(type(one) is int for one in token_ids):
        raise InvalidArgument("tokens", "must be a list of token ids")
    return DetokenizeJob(tuple(token_ids), _flag(body, "skip_special_tokens", default=False), name_in(body, "model"))


def _flag(body: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = body.get(name, default)
    if not isinstance(value, bool):
        raise InvalidArgument(name, f"{str(value)[:80]!r} is not true or false")
    return value
