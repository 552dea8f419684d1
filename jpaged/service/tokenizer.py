"""The tokenizer of a model's folder, as Hugging Face's libraries read it.

Code from a model's folder is never run (trust_remote_code stays off); its chat template runs in a separate process.

`LiteralText` treats special tokens in users' text as plain text, with a twin tokenizer whose special tokens are
renamed:

    message      a <|end|> b             <|end|> written by a user
    marked       a <#|end|> b            # is a mark that no user can guess
    rendered     <|user|>a <#|end|> b    <|user|> written by the chat template
    unmarked     <#7>a <|end|> b         7 is the id of <|user|>, <#7> its name in the twin
    tokenized    7, a, <, |, end, |>, b

The text is tokenized as a whole, so users' text is split as in any other text.

`TokenBytes` bounds the bytes of text per token, so that a text that cannot fit is rejected before it is tokenized:

max bytes per token = longest token of the vocabulary * the shrinkage by normalization

This holds if every byte of a text ends up in some token: bytes without a token become several tokens, and nothing is
stripped, dropped or folded into one unknown token. If that is not certain, GENEROUS_BYTES is used.

`SegmentedTokenizer` tokenizes only the new part of a conversation. Its text is cut before certain special tokens, and
a `SegmentCache` has the ids of the parts of earlier turns:

    turn 1   <|user|>Hi <|assistant|>                                     two parts are tokenized
    turn 2   <|user|>Hi <|assistant|>Hello <|user|>Why? <|assistant|>     two are cached, and two are tokenized
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import secrets
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from jpaged import json_text
from jpaged.chat import ChatOptions
from jpaged.config import keep_tokenizers_on_their_thread
from jpaged.engine.tokenizer import NoTokenizer, Tokenizer
from jpaged.errors import InternalError, InvalidArgument, JpagedError, Unsupported
from jpaged.service.chat.sandbox import template_process
from jpaged.service.chat.template import ChatTemplate
from jpaged.service.tokenizer_parts import TIKTOKEN_FILE, TokenizerParts, byte_letters, read_parts
from jpaged.types import PackedTokens

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""Noncharacters: reserved for internal use, and not trimmed or changed by templates."""


class LiteralText:
    """The tokenizer's twin, and the marks in messages.

    Args:
        tokenizer: a `tokenizers.Tokenizer`; it is not changed.
        only: the one token to treat as text; None: all special ones.

    Attributes:
        tokenizer: the twin: the same ids, with special tokens under names that no user can guess.

    Raises:
        Unsupported: a special token cannot be renamed without changing its id.
    """

    def __init__(self, tokenizer: Any, only: str | None = None) -> None:
        from tokenizers import Tokenizer

        nonce = str(secrets.randbits(64))  # digits: no template changes their case
        self._mark = f"{_OPEN}{nonce}{_CLOSE}"
        written = json.loads(tokenizer.to_str())
        added = written["added_tokens"]
        special = {one["content"]: one["id"] for one in added if (one["content"] == only if only else one["special"])}
        self._names = {content: f"{_OPEN}{nonce}{_OPEN}{number}{_CLOSE}" for content, number in special.items()}
        _rename(written, self._names)
        self.tokenizer: Any = Tokenizer.from_str(json_text.dumps(written))
        for content, number in special.items():
            if self.tokenizer.token_to_id(self._names[content]) != number:
                raise Unsupported(
                    f"parse_special_tokens: must be on for this tokenizer, which always parses {content!r}"
                )
        longest_first = sorted(special, key=len, reverse=True)
        alone = re.escape(self._mark)
        self._special = re.compile(
            "|".join(re.escape(text) + (f"(?!{alone})" if len(text) == 1 else "") for text in longest_first) or r"(?!)"
        )

    def marked(self, value: Any) -> Any:
        """Insert a mark into each special token that messages or tools spell out, including field names."""
        if isinstance(value, str):
            while self._special.search(value):  # again if two overlap
                value = self._special.sub(lambda found: found[0][0] + self._mark + found[0][1:], value)
            return value
        if isinstance(value, dict):
            return {self.marked(key): self.marked(one) for key, one in value.items()}
        return [self.marked(one) for one in value] if isinstance(value, list | tuple) else value

    def is_needed(self, value: Any) -> bool:
        """Return True if messages or tools spell out a special token."""
        if isinstance(value, str):
            return self._special.search(value) is not None
        if isinstance(value, dict):
            return any(self.is_needed(one) for pair in value.items() for one in pair)
        return isinstance(value, list | tuple) and any(map(self.is_needed, value))

    def unmarked(self, text: str) -> str:
        """Remove the marks from rendered text, and rename the template's special tokens to the twin's names."""
        return self._special.sub(lambda found: self._names[found[0]], text).replace(self._mark, "")


def _rename(written: dict[str, Any], names: dict[str, str]) -> None:
    """Rename the special tokens of a tokenizer.json wherever they are named and not numbered."""
    for token in written["added_tokens"]:
        if token["content"] in names:
            token.update(content=names[token["content"]], normalized=False)
    model = written["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(token, token): number for token, number in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
    if "merges" in model:  # no merge may produce a special token
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        model["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)} & names.keys()]
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])


_BYTE_NAME = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CONTEXTS = ("a", "\u2581a", "e", "\u2581e", "x", "0")
GENEROUS_BYTES = 128
"""The longest tokens of published vocabularies, runs of spaces, have up to this size; words have four to six bytes."""
_SHRINKING = {"NFC": 4, "NFD": 4, "NFKC": 4, "NFKD": 4, "Lowercase": 3, "ByteLevel": 1, "Prepend": 1}
"""Normalizers that only change the form of a character, and how many bytes each may turn into one."""
_KEEPING = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"}
"""Pre-tokenizers that only split, or replace a space by something longer."""


def max_token_bytes(tokenizer: Any, vocabulary: Mapping[str, int] | None = None) -> int:
    """Return the maximum bytes of text that one token of a `tokenizers.Tokenizer` stands for.

    Args:
        vocabulary: of the tokenizer's model; None reads it from there.
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=False) if vocabulary is None else vocabulary
    steps = _steps(tokenizer.pre_tokenizer, "pretokenizers")
    is_byte_level = any(step["type"] == "ByteLevel" for step in (*steps, *_steps(tokenizer.normalizer, "normalizers")))
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    # Letters of a byte-level vocabulary stand for a byte each, except in added tokens.
    of_model = map(len, vocabulary) if is_byte_level else map(len, map(str.encode, vocabulary))
    longest = max(max(of_model, default=1), max((len(token.encode()) for token in added), default=1))
    shrinking = _shrinking(_steps(tokenizer.normalizer, "normalizers"))
    is_sound = (
        all(_is_keeping(step) for step in steps)
        and _has_every_byte(tokenizer.model, vocabulary, is_byte_level)
        and not any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values())
    )
    if shrinking is None or not is_sound:
        return max(longest, GENEROUS_BYTES)
    return longest * shrinking


class TokenBytes:
    """The bytes that each token of a `tokenizers.Tokenizer` adds to a text.

    A byte-level vocabulary encodes bytes as letters, and ByteFallback names single bytes (`<0xE2>`). For other tokens,
    the text after another token is decoded, because decoders strip a space only at the start of a text.
    """

    def __init__(self, tokenizer: Any) -> None:
        kinds = {step["type"] for step in _steps(tokenizer.decoder, "decoders")}
        self._tokenizer = tokenizer
        self._bytes = byte_letters() if "ByteLevel" in kinds else {}
        self._has_fallback = "ByteFallback" in kinds
        self._context = [found for name in _CONTEXTS if (found := tokenizer.token_to_id(name)) is not None][:1]

    def of(self, token_id: int) -> bytes:
        """Return the bytes of one token; empty for an unknown id."""
        name = self._tokenizer.id_to_token(token_id)
        if name is None:
            return b""
        if self._bytes:
            known = [self._bytes.get(letter) for letter in name]
            return name.encode() if None in known else bytes(byte for byte in known if byte is not None)
        if self._has_fallback and (match := _BYTE_NAME.fullmatch(name)):
            return bytes([int(match[1], 16)])
        before, both = self._text(self._context), self._text([*self._context, token_id])
        return (both.removeprefix(before) if both.startswith(before) else self._text([token_id])).encode()

    def _text(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False)) if token_ids else ""


def _steps(part: Any, key: str) -> list[dict[str, Any]]:
    """Return a normalizer or pre-tokenizer as in tokenizer.json, with sequences flattened."""
    if part is None:
        return []
    return _flat(json.loads(part.__getstate__()), key)


def _flat(step: dict[str, Any], key: str) -> list[dict[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    return [inner for one in step[key] for inner in _flat(one, key)]


def _shrinking(steps: list[dict[str, Any]]) -> int | None:
    """Return the factor by which normalization may shorten a text; None if it may remove arbitrary parts."""
    product = 1
    for step in steps:
        if step["type"] == "Replace":
            pattern = step["pattern"].get("String")
            if pattern is None or len(step["content"].encode()) < len(pattern.encode()):
                return None
        elif step["type"] in _SHRINKING:
            product *= _SHRINKING[step["type"]]
        else:
            return None
    return product


def _is_keeping(step: dict[str, Any]) -> bool:
    if step["type"] in ("Split", "Punctuation"):
        return step["behavior"] != "Removed"
    return step["type"] in _KEEPING


def _has_every_byte(model: Any, vocabulary: Mapping[str, int], is_byte_level: bool) -> bool:
    """Return True if each unknown character counts separately: no run of them becomes a single token, or none."""
    if is_byte_level:
        from tokenizers.pre_tokenizers import ByteLevel

        return type(model).__name__ == "BPE" and all(letter in vocabulary for letter in ByteLevel.alphabet())
    if getattr(model, "byte_fallback", False):
        return all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    return type(model).__name__ == "BPE" and model.unk_token is not None and not model.fuse_unk


class SegmentCache:
    """Token ids of parts of conversations, least recently used first out. Thread-safe.

    If it is full, the tenant with the most bytes loses its oldest entries, so that no tenant can displace the entries
    of those that use less. An entry is found only with the tenant and the salt that it was stored with: the time that
    a request takes does not show what others have sent.

    Args:
        max_bytes: limit of all entries together: texts, ids and overhead.

    Attributes:
        num_bytes: size of all entries.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: dict[str, OrderedDict[tuple[str, str], PackedTokens]] = {}
        self._tenant_bytes: dict[str, int] = {}
        self.num_bytes = 0

    def find(self, tenant: str, salt: str, texts: Sequence[str]) -> dict[str, PackedTokens]:
        """Return the ids of the texts that are cached."""
        found: dict[str, PackedTokens] = {}
        with self._lock:
            entries = self._entries.get(tenant, OrderedDict())
            for text in texts:
                if text not in found and (ids := entries.get((salt, text))) is not None:
                    entries.move_to_end((salt, text))
                    found[text] = ids
        return found

    def add(self, tenant: str, salt: str, ids_of_texts: Mapping[str, PackedTokens]) -> None:
        """Store the ids of texts; one that would take more than a quarter of the cache is not stored."""
        with self._lock:
            for text, ids in ids_of_texts.items():
                size = _entry_bytes(salt, text, ids)
                entries = self._entries.setdefault(tenant, OrderedDict())
                if (salt, text) not in entries and size <= self._max_bytes // 4:
                    entries[salt, text] = ids
                    self._count(tenant, size)
            while self.num_bytes > self._max_bytes:
                largest = max(self._tenant_bytes, key=self._tenant_bytes.__getitem__)
                (oldest_salt, text), ids = self._entries[largest].popitem(last=False)
                self._count(largest, -_entry_bytes(oldest_salt, text, ids))
            if not self._entries.get(tenant, True):
                del self._entries[tenant]

    def _count(self, tenant: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._tenant_bytes[tenant] = self._tenant_bytes.get(tenant, 0) + num_bytes
        if not self._tenant_bytes[tenant]:
            del self._tenant_bytes[tenant], self._entries[tenant]


_MAX_SEGMENTS = 1 << 15
"""Parts above which a text is tokenized as a whole: four for each of the most messages that a conversation may have."""
_ENTRY_BYTES = 400
"""Overhead of an entry: its key, the fields of its ids, and its place in the dictionary."""


def _entry_bytes(salt: str, text: str, ids: PackedTokens) -> int:
    return sys.getsizeof(text) + sys.getsizeof(salt) + sys.getsizeof(ids) + len(ids.packed) + _ENTRY_BYTES


class SegmentedTokenizer:
    """Tokenizes a text in parts that are independent of each other, and caches the ids of each.

    Args:
        fast: a `tokenizers.Tokenizer`.
        boundaries: special tokens before which a text may be cut, from `find_boundaries`.
        cache: of this tokenizer only.
    """

    def __init__(self, fast: Any, boundaries: Sequence[str], cache: SegmentCache) -> None:
        self._fast = fast
        self._boundary = re.compile(_alternatives(boundaries) if boundaries else r"(?!)")
        self._cache = cache
        self._ids: dict[int, int] = {}

    def split(self, text: str) -> list[str]:
        """Return the parts of a text; the concatenation of their ids are the ids of the text."""
        starts = [found.start() for found in self._boundary.finditer(text)]
        return [text[a:b] for a, b in zip([0, *starts], [*starts, len(text)], strict=True) if a < b]

    def encode(self, text: str, tenant: str, salt: str) -> PackedTokens:
        """Return the ids of a text without the special tokens that the tokenizer adds.

        Raises:
            InvalidArgument: the tokenizer cannot encode it.
        """
        parts = self.split(text)
        if len(parts) > _MAX_SEGMENTS:
            return PackedTokens(_encode(self._fast, _MESSAGES, text, add_special_tokens=False))
        known = self._cache.find(tenant, salt, parts)
        missing = list(dict.fromkeys(part for part in parts if part not in known))
        if missing:
            encoded = _encode_all(self._fast, _MESSAGES, missing, add_special_tokens=False)
            # One object for each id: an entry has 12 bytes a token, not 40, and none is made or freed for a prompt.
            shared = self._ids.setdefault
            new = {part: PackedTokens(map(shared, ids, ids)) for part, ids in zip(missing, encoded, strict=True)}
            known |= new
            if len(parts) > 1:  # a text without a boundary is found again only if it is repeated as a whole
                self._cache.add(tenant, salt, new)
        return PackedTokens.join(map(known.__getitem__, parts))


_MAX_BOUNDARIES = 256
"""Number of special tokens above which only those that a template names are considered: Gemma's tokenizer has 6000."""
_INDEPENDENT = {
    *("ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "Split", "Punctuation"),
    *("Whitespace", "WhitespaceSplit", "CharDelimiterSplit", "BertPreTokenizer"),
}
"""Pre-tokenizers that treat each part between special tokens separately. Metaspace treats the part at the start of a
text in a different way, and a part that follows a special token is never there."""


def find_boundaries(fast: Any, likely: str) -> list[str]:
    """Return special tokens before which any text may be cut without changing its ids.

    The tokenizer finds added tokens in the text as it is, from left to right, and never two that overlap. It then
    normalizes and tokenizes each piece between them separately. A special token is a boundary if it is found wherever
    it is written: no other added token contains it, and no added token is or ends with its beginning. Then cutting
    before it changes no piece. The exceptions, for which there are no boundaries:

    - added tokens that are found only between words, because they depend on the character before them;
    - a token that takes spaces before it, which belong to the piece that would be cut;
    - tokenizers with an unknown pre-tokenizer, or random merges.

    Args:
        fast: a `tokenizers.Tokenizer`.
        likely: a text with the special tokens that conversations have, such as the chat template.
    """
    added = list(fast.get_added_tokens_decoder().values())
    raw = [token for token in added if not token.normalized and token.content]
    steps = _steps(fast.pre_tokenizer, "pretokenizers")
    is_unknown = any(step["type"] not in _INDEPENDENT for step in steps)
    is_random = bool(getattr(fast.model, "dropout", None))
    if is_unknown or is_random or fast.encode_special_tokens or any(token.single_word for token in raw):
        return []
    found = [token.content for token in raw if token.special and not token.lstrip and not token.content[0].isspace()]
    if len(found) > _MAX_BOUNDARIES:
        found = [content for content in found if content in likely][:_MAX_BOUNDARIES]
    every = {token.content for token in raw}
    ends = {content[i:] for content in every for i in range(len(content))}
    whole = "\0".join(every)
    return [
        content
        for content in dict.fromkeys(found)
        if whole.count(content) == 1 and not any(content[:i] in ends for i in range(1, len(content)))
    ]


def _alternatives(words: Sequence[str]) -> str:
    """Return a regular expression of words none of which begins with another; it tries each character once."""
    if len(words) == 1:
        return re.escape(words[0])
    letters = enumerate(zip(min(words), max(words), strict=False))
    num_shared = next(i for i, (a, b) in letters if a != b)
    branches: dict[str, list[str]] = {}
    for word in words:
        branches.setdefault(word[num_shared], []).append(word[num_shared:])
    return f"{re.escape(words[0][:num_shared])}(?:{'|'.join(map(_alternatives, branches.values()))})"


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", TIKTOKEN_FILE)
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
_SENTENCEPIECE_FILE = "tokenizer.model"
_POINTER = b"version https://git-lfs.github.com/spec/"
_MAX_FILE_BYTES = {
    "tokenizer.json": 1 << 28,
    "tokenizer.model": 1 << 28,
    TIKTOKEN_FILE: 1 << 28,
    "vocab.json": 1 << 27,
    "merges.txt": 1 << 27,
    "vocab.txt": 1 << 27,
    "tokenizer_config.json": 1 << 24,
    "added_tokens.json": 1 << 24,
    "special_tokens_map.json": 1 << 24,
    "chat_template.jinja": 1 << 20,
    "chat_template.json": 1 << 20,
}
"""Size limits of a tokenizer's files, which libraries read whole; the largest published ones have 40 MB."""
_MESSAGES = "chat.messages"
_MAX_REQUEST_TEMPLATES = 16
"""Maximum number of cached request templates."""
_LOG = logging.getLogger(__name__)
_SHORT = 2000
"""Characters or tokens that take 1 ms. The Rust tokenizer holds the GIL for a single text, but not for a batch."""


_MAX_SEGMENT_BYTES = 128 << 20
"""Size of the cache of conversations' token ids: about 16 bytes a token, so 270 conversations of 30,000 tokens."""


class TemplateSettings(NamedTuple):
    """Options of rendering chat templates.

    Attributes:
        content_format: form of a message's text, as in `ChatTemplate`.
        kwargs: variables of the template for chats that do not set them.
        efforts: reasoning efforts of chats -> those that the template gets instead.
    """

    content_format: str = "auto"
    kwargs: Mapping[str, Any] = MappingProxyType({})
    efforts: Mapping[str, str] = MappingProxyType({})


_USUAL_TEMPLATES = TemplateSettings()


class HuggingFaceTokenizer:
    """A tokenizer from a folder in Hugging Face layout.

    Args:
        parts: tokenizer parts from elsewhere than the folder's files.
        parse_special_tokens: parse special tokens that a text or message spells out. Those that a chat template writes
            are always parsed.
        chat_template: source of a template that replaces the model's; None for the model's.
        trusts_request_templates: a chat request may bring a template.
        starts_templates: start the process that renders the model's template at once, not at the first chat.
        templates: how every template is rendered.

    Attributes:
        folder: source folder, or the GGUF file.

    Raises:
        InvalidArgument: `chat_template` is broken, or `templates` set a variable that is not theirs to set. If the
            model's template is broken, only chats are disabled.
        Unsupported: this kind of tokenizer cannot distinguish special tokens from text.
    """

    def __init__(
        self,
        folder: Path,
        *,
        parts: TokenizerParts | None = None,
        parse_special_tokens: bool = True,
        chat_template: str | None = None,
        trusts_request_templates: bool = False,
        starts_templates: bool = True,
        templates: TemplateSettings = _USUAL_TEMPLATES,
    ) -> None:
        # The process takes a second to start, in parallel to the rest; a server without text never starts one.
        has_template = parts is not None and parts.chat_template is not None
        if chat_template is not None or (starts_templates and (has_template or _may_have_chat_template(folder))):
            template_process()
        keep_tokenizers_on_their_thread()
        self.folder = folder
        parts = parts or read_parts(folder)
        self.vocab_size = parts.vocab_size
        self.eos_token_ids = frozenset() if parts.eos_token_id is None else frozenset({parts.eos_token_id})
        # The Rust tokenizer is thread-safe if called directly; transformers' wrapper resets its truncation on every
        # call and fails
        # with "Already borrowed" under threads.
        self._fast, self._slow = parts.fast, parts.slow
        self._lock, self._trial = threading.Lock(), threading.Lock()
        self.max_token_bytes = GENEROUS_BYTES
        self._token_bytes = None if self._fast is None else TokenBytes(self._fast)
        if self._fast is not None:
            self._fast.no_truncation()  # the wrapper's default too: a prompt is whole or refused
            self._fast.no_padding()
            self.max_token_bytes = max_token_bytes(self._fast, parts.vocabulary)
            self._fast.encode("")  # fail now if a part names tokens that do not exist
        self._literal: LiteralText | None = None
        if not parse_special_tokens:
            if self._fast is None:
                raise Unsupported(
                    f"parse_special_tokens: must be on for the tokenizer in {folder.name}, which is not a fast one"
                )
            self._literal = LiteralText(self._fast)
        self._placeholder: LiteralText | None = None
        self._variables = parts.special_tokens
        self._trusts_request_templates = trusts_request_templates
        self._settings = templates
        self._request_chats: OrderedDict[str, ChatTemplate] = OrderedDict()
        self._templates = parts.chat_template, parts.chat_template_problem, parts.tool_chat_template
        self._chats: tuple[ChatTemplate | Unsupported, ChatTemplate | Unsupported] | None = None
        self._segmented: SegmentedTokenizer | None = None
        if chat_template is not None:
            made = self._made(chat_template, field="chat_template")
            made.check_defaults(self._settings.kwargs)
            self._templates, self._chats = (chat_template, None, None), (made, made)
        elif templates.kwargs:
            self._tried_chats()  # an error before weights are read

    def set_placeholder(self, token_id: int) -> None:
        """Treat a token that templates print for an image as plain text if messages spell it out."""
        name = None if self._fast is None else self._fast.id_to_token(token_id)
        if self._literal is None and name in self.special_tokens:
            with contextlib.suppress(Unsupported):
                self._placeholder = LiteralText(self._fast, name)

    @property
    def has_chat_template(self) -> bool:
        return isinstance(self._tried_chats()[0], ChatTemplate)

    def _tried_chats(self) -> tuple[ChatTemplate | Unsupported, ChatTemplate | Unsupported]:
        """Return the chat templates without and with tools; the first call tries them, which waits for the process."""
        with self._trial:
            if self._chats is None:
                source, problem, with_tools = self._templates
                plain = self._model_chat(source, problem)
                if isinstance(plain, ChatTemplate):
                    plain.check_defaults(self._settings.kwargs)
                tools = plain if with_tools is None else self._model_chat(with_tools, None, is_for_tools=True)
                self._chats = plain, tools
            return self._chats

    def to_json(self) -> str | None:
        """Return the tokenizer as a tokenizer.json; None if it is implemented in Python."""
        return None if self._fast is None else str(self._fast.to_str())

    @property
    def vocabulary(self) -> dict[str, int]:
        """Every token, including added ones, and its id."""
        if self._fast is not None:
            return dict(self._fast.get_vocab(with_added_tokens=True))
        return dict(self._slow.get_vocab())

    @property
    def chat_template(self) -> str | None:
        """Source of the chat template for conversations with tools, broken or not; None if there is none."""
        source, _, with_tools = self._templates
        return source if with_tools is None else with_tools

    @property
    def named_special_tokens(self) -> Mapping[str, str | list[str]]:
        """Special tokens by name, such as `eos_token`."""
        return self._variables

    @property
    def special_tokens(self) -> frozenset[str]:
        """The tokens that `decode` leaves out by default."""
        if self._fast is None:
            return frozenset(self._slow.all_special_tokens)
        added = self._fast.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    def tag_ids(self, tag: str) -> list[int]:
        """Return the ids of a text in the model's own format, such as `</think>`; special tokens are parsed."""
        if self._fast is not None:
            return _encode(self._fast, "tag", tag, add_special_tokens=False)
        return self.encode(tag, add_special_tokens=False)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if self._fast is not None:
            fast = self._fast if self._literal is None else self._literal.tokenizer
            return _encode(fast, "prompt", text, add_special_tokens=add_special_tokens)
        with self._lock:
            return list(self._slow.encode(text, add_special_tokens=add_special_tokens))

    def encode_pair(self, first: str, second: str, limit: int | None = None) -> tuple[list[int], int | None]:
        """See `PairTokenizer`.

        Raises:
            InvalidArgument: the tokenizer cannot encode a text, or the limit has no room for its special tokens.
            Unsupported: it is not a fast one.
        """
        if self._fast is None:
            raise Unsupported(f"pairs of texts: the tokenizer in {self.folder.name} is not a fast one")
        fast = self._fast if self._literal is None else self._literal.tokenizer
        pair = _encode_batch(fast, "prompt", [(first, second)], add_special_tokens=True)[0]
        ids, types, sources = list(pair.ids), list(pair.type_ids), list(pair.sequence_ids)
        if limit is not None and len(ids) > limit:
            nums = sources.count(0), sources.count(1)
            nums = _shortened(nums, limit - len(ids) + sum(nums))
            seen, kept = [0, 0], list[int]()
            for place, source in enumerate(sources):
                if source is None or seen[source] < nums[source]:
                    kept.append(place)
                if source is not None:
                    seen[source] += 1
            ids, types = [ids[place] for place in kept], [types[place] for place in kept]
        return ids, types.index(1) if 1 in types else None

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
        except BaseException as error:  # a panic in Rust is not an Exception and would escape the caller's handlers
            raise InternalError(f"the tokenizer in {self.folder.name} fails on token ids: {error}") from error

    def token_bytes(self, token_id: int) -> bytes:
        if self._token_bytes is not None:
            return self._token_bytes.of(token_id)
        return self.decode([token_id], skip_special_tokens=False).encode()

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        if self._fast is not None:
            return [self._fast.id_to_token(one) or "" for one in token_ids]
        with self._lock:
            return [one or "" for one in self._slow.convert_ids_to_tokens(list(token_ids))]

    def describe(self) -> dict[str, Any]:
        kind = "PreTrainedTokenizerFast" if self._slow is None else type(self._slow).__name__
        return {"tokenizer_class": kind, **self._variables, "chat_template": self.chat_template}

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], *, max_bytes: int) -> list[int]:
        return self.chat_ids(messages, ChatOptions(), max_bytes=max_bytes)

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions, *, max_bytes: int) -> list[int]:
        """Return the ids of a conversation with tools, as `apply_chat_template`.

        Args:
            messages: as `messages.for_template` returns them.

        Raises:
            Unsupported: also if the template is broken, or does not use the tools or documents of the request.
        """
        literal = self._find_literal(messages, options)
        text = self._render(messages, options, max_bytes, literal)
        if self._fast is None:
            return self.encode(text, add_special_tokens=options.add_special_tokens)
        fast = self._fast if literal is None else literal.tokenizer
        return _encode(fast, _MESSAGES, text, add_special_tokens=options.add_special_tokens)

    def _find_literal(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> LiteralText | None:
        """Return the twin of a chat, some of whose special tokens are text; None: all are parsed."""
        if self._placeholder is None:
            return self._literal
        tools, documents = [tool.as_json() for tool in options.shown_tools], list(options.documents)
        is_needed = self._placeholder.is_needed([*messages, *tools, *documents, dict(options.template_kwargs)])
        return self._placeholder if is_needed else None

    def cached_chat_ids(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions, *, max_bytes: int, tenant: str, salt: str
    ) -> Sequence[int]:
        """Return what `chat_ids` does; tokenize only the parts of the text that the tenant has not sent with the salt.

        The whole text is tokenized for requests that add special tokens, bring a template, or spell out the placeholder
        of images.
        """
        is_whole = self._fast is None or options.add_special_tokens or options.chat_template is not None
        if is_whole or self._find_literal(messages, options) is not self._literal:
            return self.chat_ids(messages, options, max_bytes=max_bytes)
        return self._segments().encode(self._render(messages, options, max_bytes, self._literal), tenant, salt)

    def _segments(self) -> SegmentedTokenizer:
        """Return the tokenizer of the model's conversations; the first call makes it."""
        with self._trial:
            if self._segmented is None:
                source, _, with_tools = self._templates
                likely = "\n".join((source or "", with_tools or "", *map(str, self._variables.values())))
                fast = self._fast
                if self._literal is not None:
                    fast, likely = self._literal.tokenizer, self._literal.unmarked(likely)
                self._segmented = SegmentedTokenizer(
                    fast, find_boundaries(fast, likely), SegmentCache(_MAX_SEGMENT_BYTES)
                )
            return self._segmented

    def _render(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions, max_bytes: int, literal: LiteralText | None
    ) -> str:
        """Return the text of a conversation, for the twin if there is one."""
        chat = self._get_chat(options)
        documents: Any = [dict(one) for one in options.documents]
        plain: Any = [dict(message) for message in messages]
        tools: Any = [tool.as_json() for tool in options.shown_tools]
        reasoning = options.reasoning
        if reasoning.effort is not None:
            reasoning = replace(reasoning, effort=self._settings.efforts.get(reasoning.effort, reasoning.effort))
        kwargs: Any = {
            **self._settings.kwargs,
            **options.template_kwargs,
            **chat.reasoning_variables(reasoning, options.template_kwargs),
        }
        if literal is not None:
            plain, tools, kwargs, documents = (literal.marked(one) for one in (plain, tools, kwargs, documents))
        text = chat.render(plain, max_bytes=max_bytes, tools=tools, kwargs=kwargs, documents=documents, options=options)
        return text if literal is None else literal.unmarked(text)

    def _get_chat(self, options: ChatOptions) -> ChatTemplate:
        """Return the template of a chat: the request's, or the model's for chats with or without tools."""
        source = options.chat_template
        if source is None:
            chat = self._tried_chats()[1 if options.shown_tools else 0]
            if isinstance(chat, Unsupported):
                raise Unsupported(str(chat))
            return chat
        if not self._trusts_request_templates:
            raise InvalidArgument(
                "chat_template", "is not accepted: the server runs without --trust-request-chat-template"
            )
        with self._lock:
            found = self._request_chats.get(source)
        found = found or self._made(source, field="chat_template", is_for_tools=bool(options.shown_tools))
        with self._lock:
            self._request_chats[source] = found
            self._request_chats.move_to_end(source)
            while len(self._request_chats) > _MAX_REQUEST_TEMPLATES:
                self._request_chats.popitem(last=False)
        return found

    def _model_chat(
        self, source: str | None, problem: str | None, *, is_for_tools: bool = False
    ) -> ChatTemplate | Unsupported:
        """Return one of the model's templates, or the error for chats that need it."""
        if source is None and problem is None:
            return Unsupported(
                f"the tokenizer in {self.folder.name} has no chat template: send text or token ids, or name one with "
                "--chat-template"
            )
        try:
            if source is not None:
                return self._made(source, is_for_tools=is_for_tools)
        except InvalidArgument as error:
            problem = error.problem
        which = "chats with tools are" if is_for_tools else "chats are"
        _LOG.warning("%s: %s; %s disabled: see --chat-template", self.folder.name, problem, which)
        return Unsupported(f"{problem}; {which} disabled: see --chat-template")

    def _made(self, source: str, *, field: str = "model", is_for_tools: bool = False) -> ChatTemplate:
        return ChatTemplate(
            template_process(),
            source,
            self._variables,
            name=self.folder.name,
            field=field,
            is_for_tools=is_for_tools,
            content_format=self._settings.content_format,
        )


def _shortened(nums: tuple[int, int], room: int) -> tuple[int, int]:
    """Return the tokens that two texts keep in a room, as transformers' strategy "longest_first" does.

    Raises:
        InvalidArgument: there is no room for a token of each.
    """
    if room < len(nums):
        raise InvalidArgument("truncate_prompt_tokens", "leaves no token of each text next to the special tokens")
    shorter = min(nums)
    longer = room - shorter
    if longer < shorter:
        shorter = room // 2
        longer = room - shorter
    return (longer, shorter) if nums[0] > nums[1] else (shorter, longer)


def _encode(fast: Any, field: str, text: str, *, add_special_tokens: bool) -> list[int]:
    return _encode_all(fast, field, [text], add_special_tokens=add_special_tokens)[0]


def _encode_all(fast: Any, field: str, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
    """Return the ids of each text.

    Raises:
        InvalidArgument: the tokenizer cannot encode one of them.
    """
    return [list(one.ids) for one in _encode_batch(fast, field, texts, add_special_tokens=add_special_tokens)]


def _encode_batch(fast: Any, field: str, texts: Sequence[Any], *, add_special_tokens: bool) -> list[Any]:
    """Return the encodings of texts, or of pairs of texts; raise as `_encode_all`."""
    try:
        if sum(map(len, texts)) < _SHORT and all(isinstance(text, str) for text in texts):
            return [fast.encode(text, add_special_tokens=add_special_tokens) for text in texts]
        encoded: list[Any] = fast.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return encoded
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library has no error type, and panics in Rust
        raise InvalidArgument(field, f"the tokenizer cannot encode it: {error}") from error


def _may_have_chat_template(folder: Path) -> bool:
    """Return True if a chat template is likely, so that the process that renders should start early."""
    config = folder / "tokenizer_config.json"
    return any((folder / name).exists() for name in _TEMPLATE_FILES) or (
        config.exists() and b'"chat_template"' in config.read_bytes()
    )


def load_tokenizer(
    folder: Path,
    *,
    vocab_size: int,
    parts: TokenizerParts | None = None,
    parse_special_tokens: bool = True,
    chat_template: str | None = None,
    trusts_request_templates: bool = False,
    starts_templates: bool = True,
    templates: TemplateSettings = _USUAL_TEMPLATES,
) -> Tokenizer:
    """Load the tokenizer of a model's folder; without tokenizer files, return one that handles only ids.

    Args:
        parts: tokenizer parts from elsewhere than the folder's files, such as a GGUF file's metadata.
        chat_template, trusts_request_templates, starts_templates, templates: as in `HuggingFaceTokenizer`.

    Raises:
        InvalidArgument: a file is broken.
        Unsupported: see `HuggingFaceTokenizer`.
    """
    if parts is None and not any((folder / name).exists() for name in _TOKENIZER_FILES):
        return NoTokenizer(vocab_size)
    _check_sizes(folder)
    try:
        return HuggingFaceTokenizer(
            folder,
            parts=parts,
            parse_special_tokens=parse_special_tokens,
            chat_template=chat_template,
            trusts_request_templates=trusts_request_templates,
            starts_templates=starts_templates,
            templates=templates,
        )
    except (JpagedError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # two libraries read the files; they raise errors of every kind, and panics in Rust
        raise InvalidArgument("model", f"{folder}: the tokenizer cannot be loaded: {_why(folder, error)}") from error


def _check_sizes(folder: Path) -> None:
    """Reject files over their size limits before anything reads them."""
    paths = [(folder / name, limit) for name, limit in _MAX_FILE_BYTES.items()]
    templates = (folder / "additional_chat_templates").glob("*.jinja")
    paths += [(path, _MAX_FILE_BYTES["chat_template.jinja"]) for path in templates]
    for path, limit in paths:
        if path.is_file() and (size := path.stat().st_size) > limit:
            raise InvalidArgument("model", f"{path} has {size} bytes; the limit for this file is {limit} bytes")


def _why(folder: Path, error: BaseException) -> str:
    """Return a message that explains the error, with the file's name if a file cannot be read."""
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
        return f"{_SENTENCEPIECE_FILE} is not a SentencePiece model: add the tokenizer.json of the same model"
    return f"{type(error).__name__}: {error}".partition("\n")[0]
