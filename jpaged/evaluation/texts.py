"""Text <-> tokens as the harness means it, by the tokenizer that its own `hf` model would have.

https://github.com/EleutherAI/lm-evaluation-harness/blob/main/docs/model_guide.md says what a model has to hold to.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from jpaged.errors import InvalidArgument

_NUM_KEPT = 64
"""Texts whose tokens are kept: the choices of a question come one after the other, with one context."""

_log = logging.getLogger(__name__)


class Texts:
    """A tokenizer of transformers, and which special tokens texts begin with.

    Args:
        inner: transformers' tokenizer.
        add_bos_token: whether texts get special tokens; None leaves it to the tokenizer.
        prefix_token_id: what texts without a context are behind; None is the tokenizer's bos, or eos without one.
    """

    def __init__(self, inner: Any, *, add_bos_token: bool | None = None, prefix_token_id: int | None = None) -> None:
        self.inner = inner
        self._add_bos_token = add_bos_token
        self._given_prefix_token_id = prefix_token_id
        self._encoded = functools.lru_cache(_NUM_KEPT)(self._encode)

    @classmethod
    def load(cls, folder: Path, *, add_bos_token: bool | None = None, prefix_token_id: int | None = None) -> Texts:
        """Read the tokenizer of a folder in Hugging Face layout. Code from there is never run.

        Raises:
            InvalidArgument: there is none, or it is broken.
        """
        from transformers import AutoTokenizer  # which takes a second to import

        if not folder.is_dir():
            raise InvalidArgument("tokenizer", f"{folder.name} is a file: give a folder or hub id as tokenizer=...")
        options = {} if add_bos_token is None else {"add_bos_token": add_bos_token}
        try:
            inner = AutoTokenizer.from_pretrained(str(folder), **options)
        except (OSError, ValueError, KeyError, TypeError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise InvalidArgument("tokenizer", f"{folder}: cannot be loaded: {lines[0]}") from error
        return cls(inner, add_bos_token=add_bos_token, prefix_token_id=prefix_token_id)

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text; None where the tokenizer names none."""
        token_id: int | None = self.inner.eos_token_id
        return token_id

    @property
    def prefix_token_id(self) -> int:
        """What texts without a context are behind.

        Raises:
            InvalidArgument: the tokenizer has no such token.
        """
        for token_id in (self._given_prefix_token_id, self.inner.bos_token_id, self.inner.eos_token_id):
            if token_id is not None:
                return int(token_id)
        raise InvalidArgument("prefix_token_id", "is needed: the tokenizer has neither bos nor eos")

    @property
    def name(self) -> str:
        """Its name, as the harness keeps what it has cached under it."""
        return str(self.inner.name_or_path).replace("/", "__")

    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """The tokens of a text.

        Args:
            add_special_tokens: None is as for all texts, but for those that begin with the prefix token already.
        """
        return list(self._encoded(text, add_special_tokens))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        return str(self.inner.decode(list(token_ids), skip_special_tokens=True))

    def id_of(self, token: str) -> int | None:
        """The id of a text that is one token added to the vocabulary; None where it is none."""
        token_id: int | None = self.inner.get_added_vocab().get(token)
        return token_id

    def of_chat(
        self, messages: Sequence[Mapping[str, str]], variables: Mapping[str, Any], *, add_generation_prompt: bool = True
    ) -> str:
        """Lay out a conversation through the chat template; a template that refuses a system message gets none.

        Args:
            variables: of the template.
            add_generation_prompt: False leaves the last message open, to be gone on with.
        """
        render = functools.partial(
            self.inner.apply_chat_template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **variables,
        )
        try:
            return str(render(list(messages)))
        except TemplateError as error:
            others = [message for message in messages if message["role"] != "system"]
            if len(others) == len(messages):
                raise InvalidArgument("messages", f"the chat template refuses them: {error}") from error
            _log.warning("the chat template refuses a conversation (%s): its system message is left out", error)
            return str(render(others))

    def _encode(self, text: str, add_special_tokens: bool | None) -> tuple[int, ...]:
        flag = add_special_tokens
        if flag is None:
            flag = False if self._begins_with_prefix(text) else self._add_bos_token
        options = {} if flag is None else {"add_special_tokens": flag}
        return tuple(self.inner.encode(text, **options))

    def _begins_with_prefix(self, text: str) -> bool:
        prefix = str(self.inner.decode([self.prefix_token_id]))
        return bool(prefix) and text.startswith(prefix)
