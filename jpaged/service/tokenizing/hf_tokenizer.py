"""The tokenizer of a model's folder, as Hugging Face's libraries read it.

Code from a model's folder is never run (trust_remote_code stays off); its chat template runs in a process of its own.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jpaged.chat import ChatOptions
from jpaged.config import keep_tokenizers_on_their_thread
from jpaged.engine.tokenizer import NoTokenizer, Tokenizer
from jpaged.errors import InternalError, InvalidArgument, JpagedError, Unsupported
from jpaged.service.chat.process import template_process
from jpaged.service.chat.template import ChatTemplate
from jpaged.service.tokenizing.literal_text import LiteralText
from jpaged.service.tokenizing.token_bytes import GENEROUS_BYTES, max_token_bytes
from jpaged.service.tokenizing.tokenizer_parts import TokenizerParts, read_parts

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
_SENTENCEPIECE_FILE = "tokenizer.model"
_POINTER = b"version https://git-lfs.github.com/spec/"
_MESSAGES = "chat.messages"
_SHORT = 2000
"""Characters or tokens that take a millisecond. The Rust tokenizer keeps the GIL for one text, and not for a batch."""


class HuggingFaceTokenizer:
    """A tokenizer from a folder in Hugging Face layout.

    Args:
        parts: what is said elsewhere than in the folder's files.
        parse_special_tokens: whether special tokens written out in a text, or in a message, are what they say. Those
            that a chat template writes always are.

    Attributes:
        folder: where it was read; a file, where it was read out of one of GGUF.

    Raises:
        InvalidArgument: its chat template is broken.
        Unsupported: special tokens cannot be told from text in this kind of tokenizer.
    """

    def __init__(self, folder: Path, *, parts: TokenizerParts | None = None, parse_special_tokens: bool = True) -> None:
        # It takes a second to start, which goes by beside this; a server without text never has one.
        if _may_have_chat_template(folder):
            template_process()
        keep_tokenizers_on_their_thread()
        self.folder = folder
        parts = parts or read_parts(folder)
        self.vocab_size = parts.vocab_size
        self.eos_token_ids = frozenset() if parts.eos_token_id is None else frozenset({parts.eos_token_id})
        # The Rust tokenizer is thread-safe when called itself; transformers' wrapper of it resets its truncation on
        # every call and fails with "Already borrowed" under threads.
        self._fast, self._slow = parts.fast, parts.slow
        self._lock = threading.Lock()
        self.max_token_bytes = GENEROUS_BYTES
        if self._fast is not None:
            self._fast.no_truncation()  # the wrapper's default too: a prompt is whole or refused
            self._fast.no_padding()
            self.max_token_bytes = max_token_bytes(self._fast)
            self._fast.encode("")  # a part that names tokens which are not there fails on every text
        self._literal: LiteralText | None = None
        if not parse_special_tokens:
            if self._fast is None:
                raise Unsupported(
                    f"parse_special_tokens: always with the tokenizer in {folder.name}, which is no fast one"
                )
            self._literal = LiteralText(self._fast)
        self._chat = self._template(parts.chat_template, parts)
        self._tool_chat = self._template(parts.tool_chat_template, parts) or self._chat

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    def to_json(self) -> str | None:
        """The tokenizer as a tokenizer.json says it; None where it is one in Python."""
        return None if self._fast is None else str(self._fast.to_str())

    @property
    def vocabulary(self) -> dict[str, int]:
        """Every token, those that were added too, and its id."""
        if self._fast is not None:
            return dict(self._fast.get_vocab(with_added_tokens=True))
        return dict(self._slow.get_vocab())

    @property
    def chat_template(self) -> str | None:
        """The source of the template of conversations with tools; None without one."""
        return None if self._tool_chat is None else self._tool_chat.source

    @property
    def special_tokens(self) -> frozenset[str]:
        """The tokens that `decode` leaves out unless it is told to keep them."""
        if self._fast is None:
            return frozenset(self._slow.all_special_tokens)
        added = self._fast.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    def tag_ids(self, tag: str) -> list[int]:
        """The ids of a text of the model's own format, such as `</think>`: special tokens are what they say."""
        if self._fast is not None:
            return _encode(self._fast, "tag", tag, add_special_tokens=False)
        return self.encode(tag, add_special_tokens=False)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if self._fast is not None:
            fast = self._fast if self._literal is None else self._literal.tokenizer
            return _encode(fast, "prompt", text, add_special_tokens=add_special_tokens)
        with self._lock:
            return list(self._slow.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if self._fast is None:
            with self._lock:
                return str(self._slow.decode(list(token_ids), skip_special_tokens=skip_special_tokens))
        try:
            if len(token_ids) < _SHORT:
                return str(self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens))
            return str(self._fast.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0])
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in Rust is no Exception, and would pass by whoever waits for an end
            raise InternalError(f"the tokenizer in {self.folder.name} fails on token ids: {error}") from error

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], *, max_bytes: int) -> list[int]:
        return self.chat_ids(messages, ChatOptions(), max_bytes=max_bytes)

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions, *, max_bytes: int) -> list[int]:
        """Ids of a conversation with tools, as `apply_chat_template`.

        Args:
            messages: as `messages.for_template` has them.

        Raises:
            Unsupported: besides, its template takes no notice of the tools that are there.
        """
        chat = self._tool_chat if options.shown_tools else self._chat
        if chat is None:
            raise Unsupported(f"the tokenizer in {self.folder.name} has no chat template: send text or token ids")
        plain: Any = [dict(message) for message in messages]
        tools: Any = [tool.as_json() for tool in options.shown_tools]
        kwargs: Any = {
            **options.template_kwargs,
            **chat.reasoning_variables(options.reasoning, options.template_kwargs),
        }
        if self._literal is None:
            text = chat.render(plain, max_bytes=max_bytes, tools=tools, kwargs=kwargs)
            if self._fast is None:
                return self.encode(text, add_special_tokens=False)
            return _encode(self._fast, _MESSAGES, text, add_special_tokens=False)
        plain, tools, kwargs = (self._literal.marked(one) for one in (plain, tools, kwargs))
        text = chat.render(plain, max_bytes=max_bytes, tools=tools, kwargs=kwargs)
        return _encode(self._literal.tokenizer, _MESSAGES, self._literal.unmarked(text), add_special_tokens=False)

    def _template(self, source: str | None, parts: TokenizerParts) -> ChatTemplate | None:
        if source is None:
            return None
        return ChatTemplate(template_process(), source, parts.special_tokens, name=self.folder.name)


def _encode(fast: Any, field: str, text: str, *, add_special_tokens: bool) -> list[int]:
    try:
        if len(text) < _SHORT:
            return list(fast.encode(text, add_special_tokens=add_special_tokens).ids)
        return list(fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library has no error of its own, and panics in Rust
        raise InvalidArgument(field, f"the tokenizer cannot take it apart: {error}") from error


def _may_have_chat_template(folder: Path) -> bool:
    """Whether a chat template is likely, so that the process that renders is worth starting early."""
    config = folder / "tokenizer_config.json"
    return any((folder / name).exists() for name in _TEMPLATE_FILES) or (
        config.exists() and b'"chat_template"' in config.read_bytes()
    )


def load_tokenizer(
    folder: Path, *, vocab_size: int, parts: TokenizerParts | None = None, parse_special_tokens: bool = True
) -> Tokenizer:
    """The tokenizer of a model's folder; one that knows ids alone where there are no tokenizer files.

    Args:
        parts: what is said elsewhere than in the folder's files, in a GGUF file's metadata.

    Raises:
        InvalidArgument: a file is broken.
        Unsupported: see `HuggingFaceTokenizer`.
    """
    if parts is None and not any((folder / name).exists() for name in _TOKENIZER_FILES):
        return NoTokenizer(vocab_size)
    try:
        return HuggingFaceTokenizer(folder, parts=parts, parse_special_tokens=parse_special_tokens)
    except (JpagedError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # two libraries read the files, with errors of every kind, and panics in Rust
        raise InvalidArgument("model", f"{folder}: the tokenizer cannot be loaded: {_why(folder, error)}") from error


def _why(folder: Path, error: BaseException) -> str:
    """Names the file, where it is one that cannot be read."""
    for path in (*sorted(folder.glob("*token*.json")), folder / _SENTENCEPIECE_FILE):
        if path.is_symlink() and not path.exists():
            return f"{path.name} is a link to a file that is missing: download the model again"
        if path.is_file():
            with path.open("rb") as file:
                if file.read(len(_POINTER)) == _POINTER:
                    return f"{path.name} is a pointer of Git LFS, not the file itself: run `git lfs pull` in its folder"
    for path in sorted(folder.glob("*token*.json")):
        try:
            value = json.loads(path.read_text(encoding="utf-8-sig"))
        except RecursionError:
            return f"{path.name} is nested too deep"
        except (OSError, ValueError) as found:
            return f"{path.name} cannot be read as JSON: {found}"
        if not isinstance(value, dict) or not value:
            return f"{path.name} must hold a JSON object with fields"
    if "tiktoken" in str(error) and (folder / _SENTENCEPIECE_FILE).is_file():
        return f"{_SENTENCEPIECE_FILE} is no model of SentencePiece: add the tokenizer.json of the same model"
    return f"{type(error).__name__}: {error}".partition("\n")[0]
