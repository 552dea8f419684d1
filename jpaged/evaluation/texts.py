"""Tokenization with the harness's semantics, by the tokenizer that its `hf` model would use.

https://github.com/EleutherAI/lm-evaluation-harness/blob/main/docs/model_guide.md lists the requirements on a model.
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
"""Texts whose tokens are cached: the choices of a question arrive in sequence, with one context."""

_log = logging.getLogger(__name__)


class Texts:
    """Tokenizer of transformers, with rules for special tokens at the start of texts.

    Args:
        inner: transformers' tokenizer.
        add_bos_token: True if texts get special tokens; None leaves it to the tokenizer.
        prefix_token_id: token before texts without a context; None is the tokenizer's bos, or eos without one.
    """

    def __init__(self, inner: Any, *, add_bos_token: bool | None = None, prefix_token_id: int | None = None) -> None:
        self.inner = inner
        self._add_bos_token = add_bos_token
        self._given_prefix_token_id = prefix_token_id
        self._encoded = functools.lru_cache(_NUM_KEPT)(self._encode)

    @classmethod
    def load(cls, folder: Path, *, add_bos_token: bool | None = None, prefix_token_id: int | None = None) -> Texts:
        """Load the tokenizer of a folder in Hugging Face layout, without running code from there.

        Raises:
            InvalidArgument: there is none, or it is broken.
        """
        from transformers import AutoTokenizer  # takes a second to import

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
        """Return the token that ends a text; None if the tokenizer has none."""
        token_id: int | None = self.inner.eos_token_id
        return token_id

    @property
    def prefix_token_id(self) -> int:
        """Return the token before texts without a context.

        Raises:
            InvalidArgument: the tokenizer has no such token.
        """
        for token_id in (self._given_prefix_token_id, self.inner.bos_token_id, self.inner.eos_token_id):
            if token_id is not None:
                return int(token_id)
        raise InvalidArgument("prefix_token_id", "is required: the tokenizer has no bos or eos token")

    @property
    def name(self) -> str:
        """Return the name under which the harness caches."""
        return str(self.inner.name_or_path).replace("/", "__")

    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Return the tokens of a text.

        Args:
            add_special_tokens: None applies the default, except to texts that already begin with the prefix token.
        """
        return list(self._encoded(text, add_special_tokens))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        return str(self.inner.decode(list(token_ids), skip_special_tokens=True))

    def id_of(self, token: str) -> int | None:
        """Return the id of a text that is one added token of the vocabulary, or None."""
        token_id: int | None = self.inner.get_added_vocab().get(token)
        return token_id

    def of_chat(
        self, messages: Sequence[Mapping[str, str]], variables: Mapping[str, Any], *, add_generation_prompt: bool = True
    ) -> str:
        """Render a conversation with the chat template; if the template rejects a system message, drop it.

        Args:
            variables: variables of the template.
            add_generation_prompt: False leaves the last message open, to be continued.
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
                raise InvalidArgument("messages", f"the chat template rejects them: {error}") from error
            _log.warning("the chat template rejects a conversation (%s): dropped its system message", error)
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
