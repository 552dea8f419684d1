"""The parts of a tokenizer, read from a model's folder by `tokenizers` alone, or by transformers.

    tokenizer.json, a config that adds nothing to it    tokenizers       10 ms
    tiktoken.model of Kimi                              tokenizers       2 s
    anything else                                       transformers     1 s, and 3 s if torch is installed

Code from a model's folder is never run: trust_remote_code stays off.

A line of tiktoken.model has the bytes of a token, in base64, and its number. A text is split by a pattern. A piece that
is no token begins as bytes, and the neighbors whose result has the lowest number are joined first.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import tempfile
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jpaged.errors import InvalidArgument

_TOKENIZER_FILE, _CONFIG_FILE, _TEMPLATE_FILE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""The two names of transformers' class that uses tokenizer.json unchanged."""
_GENERIC_MODEL_TYPE = "llama"
"""The model type for which transformers honors a generic class; some other types have a dedicated class."""
_OTHER_FILES = (
    *("tokenizer.model", "chat_template.json", "additional_chat_templates"),
    *("added_tokens.json", "special_tokens_map.json"),  # read if the config has no added_tokens_decoder
)
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS_OF_TOKENS = ("additional_special_tokens", "extra_special_tokens")
_WITHOUT_EFFECT = (
    *("tokenizer_class", "backend", "chat_template", "model_max_length", "clean_up_tokenization_spaces"),
    *("model_input_names", "padding_side", "truncation_side", "is_local", "local_files_only"),
)
"""Config keys that change neither the tokens of a text nor the text of tokens (with this package's decode options)."""
_FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
TIKTOKEN_FILE, TIKTOKEN_CLASS = "tiktoken.model", "TikTokenTokenizer"
"""The file, and the class that `tokenizer_config.json` names next to it."""
_NUM_RESERVED = 256
"""Special tokens after the vocabulary; those without a name are reserved."""
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = (f"[{letters}\\p{{Lm}}\\p{{Lo}}\\p{{M}}&&[^\\p{{Han}}]]" for letters in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
_TIKTOKEN_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_NO_TORCH = "PyTorch was not found."


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """Contents of a tokenizer's files.

    Attributes:
        fast: the tokenizer of the Rust library; None if there is only `slow`.
        slow: transformers' tokenizer, if it is implemented in Python.
        vocab_size: number of ids, added tokens included.
        eos_token_id: None if the files name none.
        chat_template: its source; None if there is none.
        tool_chat_template: the template for conversations with tools, if it is another one.
        chat_template_problem: why no template can be used; None if one can, or there is none.
        special_tokens: by name (`bos_token` etc.), as a chat template sees them.
        vocabulary: ids by token of the model in `fast`; None if only `fast` has them. Copying a large vocabulary from
            there takes a fifth of a second.
    """

    fast: Any
    slow: Any
    vocab_size: int
    eos_token_id: int | None
    chat_template: str | None
    special_tokens: Mapping[str, str | list[str]]
    tool_chat_template: str | None = None
    chat_template_problem: str | None = None
    vocabulary: Mapping[str, int] | None = None


def read_parts(folder: Path) -> TokenizerParts:
    """Read the tokenizer of a folder by the faster method that gives the same tokens.

    Raises:
        Exception: the libraries have no error type, and panics in Rust are not even an `Exception`.
    """
    with _without_marks(folder) as plain:
        return _read_plain(plain) or _read_tiktoken(plain) or _read_by_transformers(plain)


@contextmanager
def _without_marks(folder: Path) -> Iterator[Path]:
    """Yield the folder, or a copy of the tokenizer files without byte order marks, which no library accepts."""
    marked = [path for path in folder.iterdir() if path.suffix in (".json", ".jinja") and _is_marked(path)]
    if not marked:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="jpaged-tokenizer-") as scratch:
        for path in folder.iterdir():
            copy = Path(scratch) / path.name
            if path in marked:
                copy.write_bytes(path.read_bytes().removeprefix(BOM_UTF8))
            else:
                copy.symlink_to(path.absolute())
        yield Path(scratch)


def _is_marked(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(BOM_UTF8)) == BOM_UTF8


def _read_plain(folder: Path) -> TokenizerParts | None:
    """Return the parts if transformers' class would add nothing to tokenizer.json; None if it might."""
    config, model = _json_object(folder / _CONFIG_FILE), _json_object(folder / "config.json")
    if config.get("tokenizer_class") not in _GENERIC_CLASSES or model.get("model_type") != _GENERIC_MODEL_TYPE:
        return None
    if not (folder / _TOKENIZER_FILE).is_file() or any((folder / name).exists() for name in _other_files(config)):
        return None
    from tokenizers import Tokenizer

    fast = Tokenizer.from_file(str(folder / _TOKENIZER_FILE))
    named = {name: config[name] for name in _NAMED_TOKENS if config.get(name) is not None}
    return _build_parts(folder, config, fast, named) if _adds_nothing(config, fast, named) else None


def _read_tiktoken(folder: Path) -> TokenizerParts | None:
    """Return the parts of a vocabulary of tiktoken; None if there is none, or another file that has a tokenizer."""
    config, path = _json_object(folder / _CONFIG_FILE), folder / TIKTOKEN_FILE
    if config.get("tokenizer_class") != TIKTOKEN_CLASS or not path.is_file() or (folder / _TOKENIZER_FILE).is_file():
        return None
    from tokenizers import AddedToken

    added = {
        int(token_id): AddedToken(flags["content"], special=bool(flags.get("special", True)), normalized=False)
        for token_id, flags in config.get("added_tokens_decoder", {}).items()
    }
    tokens = {name: config[name] for name in _NAMED_TOKENS if config.get(name) is not None}
    named = {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items()}
    return _build_parts(folder, config, read_tiktoken(path, added), named)


def _build_parts(folder: Path, config: Mapping[str, Any], fast: Any, named: Mapping[str, str]) -> TokenizerParts | None:
    """Return the parts with a folder's chat template; None if transformers must choose from several."""
    template = config.get("chat_template")
    if (folder / _TEMPLATE_FILE).is_file():
        template = (folder / _TEMPLATE_FILE).read_text(encoding="utf-8")
    if not isinstance(template, str | None):
        return None
    eos = named.get("eos_token")
    return TokenizerParts(
        fast=fast,
        slow=None,
        vocab_size=fast.get_vocab_size(with_added_tokens=True),
        eos_token_id=None if eos is None else fast.token_to_id(eos),
        chat_template=template or None,
        special_tokens=named,
    )


def _other_files(config: Mapping[str, Any]) -> tuple[str, ...]:
    return _OTHER_FILES[:3] if "added_tokens_decoder" in config else _OTHER_FILES


def _adds_nothing(config: Mapping[str, Any], fast: Any, named: Mapping[str, Any]) -> bool:
    """Return True if tokenizer.json already adds every token of the config, and the rest has no effect."""
    added = {token_id: _build_flags(token) for token_id, token in fast.get_added_tokens_decoder().items()}
    plain = {flags["content"] for flags in added.values() if flags["special"] and not flags["normalized"]}
    lists = [config[key] for key in _LISTS_OF_TOKENS if key in config]
    if len(lists) > 1 or any(not isinstance(one, list) for one in lists):
        return False
    tokens = [*named.values(), *(token for one in lists for token in one)]
    if not all(isinstance(token, str) and token in plain for token in tokens):
        return False
    for key, value in config.items():
        if key == "added_tokens_decoder":
            if not isinstance(value, dict) or {int(i): flags for i, flags in value.items()} != added:
                return False
        elif key in ("add_bos_token", "add_eos_token"):
            if value is not False or fast.post_processor is not None:
                return False
        elif key not in _WITHOUT_EFFECT and key not in _NAMED_TOKENS and key not in _LISTS_OF_TOKENS:
            return False
    return True


def _build_flags(token: Any) -> dict[str, Any]:
    return {name: getattr(token, name) for name in _FLAGS}


def _json_object(path: Path) -> dict[str, Any]:
    """Return a file's JSON object; an empty one if there is no such file or object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _read_by_transformers(folder: Path) -> TokenizerParts:
    keep_quiet_about_torch()
    from transformers import AutoTokenizer

    inner: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    template = tool_template = problem = None
    if inner.chat_template:
        try:
            template, tool_template = inner.get_chat_template(), inner.get_chat_template(tools=[])
        except ValueError as error:  # several templates, and no default
            problem = f"its chat template cannot be chosen: {error}"
    return TokenizerParts(
        fast=inner.backend_tokenizer if inner.is_fast else None,
        slow=None if inner.is_fast else inner,
        vocab_size=len(inner),
        eos_token_id=inner.eos_token_id,
        chat_template=template,
        special_tokens={
            name: value if isinstance(value, list) else str(value) for name, value in inner.special_tokens_map.items()
        },
        tool_chat_template=None if tool_template == template else tool_template,
        chat_template_problem=problem,
    )


def keep_quiet_about_torch() -> None:
    """Suppress the line that transformers logs on import if torch is missing: torch is not needed."""
    logging.getLogger("transformers").addFilter(_is_of_use)


def _is_of_use(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_NO_TORCH)


def byte_letters() -> dict[str, int]:
    """Return the letters of byte-level vocabularies: printable bytes map to themselves, others to U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def read_tiktoken(path: Path, added: Mapping[int, Any]) -> Any:
    """Return the tokenizer of the Rust library for a vocabulary.

    Args:
        added: tokens of `tokenizer_config.json` by id, as `tokenizers.AddedToken`.

    Raises:
        InvalidArgument: the file is broken.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    numbers = _read_numbers(path)
    letter_of_byte = {byte: letter for letter, byte in byte_letters().items()}
    names = {token: "".join(map(letter_of_byte.__getitem__, token)) for token in numbers}
    merges = [
        (names[token[:cut]], names[token[cut:]])
        for token in sorted(numbers, key=numbers.__getitem__)
        for cut in _cuts(token, numbers)
    ]
    vocabulary = {names[token]: number for token, number in numbers.items()}
    fast: Any = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(_TIKTOKEN_PATTERN), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.Sequence([split, letters]), decoders.ByteLevel()
    for token_id in range(len(numbers), len(numbers) + _NUM_RESERVED):
        reserved = AddedToken(f"<|reserved_token_{token_id}|>", special=True, normalized=False)
        fast.add_tokens([added.get(token_id, reserved)])
    return fast


def _cuts(token: bytes, numbers: Mapping[bytes, int]) -> list[int]:
    """Return where a token is cut into two others, in the order in which these are joined."""
    found = [cut for cut in range(1, len(token)) if token[:cut] in numbers and token[cut:] in numbers]
    return sorted(found, key=lambda cut: (numbers[token[:cut]], numbers[token[cut:]]))


def _read_numbers(path: Path) -> dict[bytes, int]:
    """Return the number of each token.

    Raises:
        InvalidArgument: a line is no token with its number, the numbers have gaps, or a byte is missing.
    """
    numbers: dict[bytes, int] = {}
    for line, text in enumerate(path.read_bytes().splitlines(), 1):
        token, _, number = text.partition(b" ")
        try:
            numbers[base64.b64decode(token, validate=True)] = int(number)
        except (binascii.Error, ValueError) as error:
            raise InvalidArgument(
                "model", f"{path.name}: line {line} must be a token in base64 and its number"
            ) from error
    if sorted(numbers.values()) != [*range(len(numbers))] or any(bytes([byte]) not in numbers for byte in range(256)):
        raise InvalidArgument(
            "model", f"{path.name} must number its tokens from 0, without gaps, and have all 256 bytes"
        )
    return numbers
