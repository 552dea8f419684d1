"""GGUF metadata -> tokens, and a tokenizer of the `tokenizers` library.

It works without transformers, whose GGUF reader needs torch.

    gpt2     byte-level BPE; `pre` names the expressions that first split a text into words
    llama    SentencePiece's BPE: neighbors that form a token are merged, those with the highest score first
    gemma4   the same with a list of merges

Control tokens are special tokens. User-defined tokens are matched in any text, the longest first. Texts are split as in
llama.cpp: without composition of characters (NFC), although the libraries of Qwen and GPT-NeoX do that.

`GgufVocabulary` has the tokens, their types, and the tokens that end a text. Converters have given many tokens a wrong
type, and many files have no id for the end of a turn. So llama.cpp recognizes such tokens by name, and so does this
module.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.checkpoints.gguf.file import GgufFile, open_gguf
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.kernels.cpu.library import find_merges

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
"""Types of tokens."""
_ROLES = ("bos", "eos", "eot", "eom", "unknown", "padding")
_SENTENCE_PIECE = {"bos": 1, "eos": 2, "unknown": 0}
"""Defaults of SentencePiece files that do not specify these."""
# Names that llama.cpp treats as the end of a text, independent of the token's type.
_ENDS = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"),
    *("<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~[", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>"),
    *("<\uff5cend\u2581of\u2581sentence\uff5c>", "<end_of_utterance>", "<turn|>", "<|tool_response>"),
)
_END_OF_SEQUENCE = "</s>"
"""Ends a text if it is a control token; Gemma's is the HTML tag, although llama.cpp stops at it."""
_END_OF_MESSAGE = "<|end|>"
_ENDS_OF_MESSAGES = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})
"""Vocabularies with one of these pairs have several messages in a turn, separated by `<|end|>`."""
# Tokens that begin a turn in chat templates.
_TURNS = (
    *("<start_of_turn>", "<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|start_of_role|>", "<|end_of_role|>"),
    *("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"),
)
_NAMES = frozenset((*_ENDS, *_TURNS, _END_OF_SEQUENCE))


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """The tokens of a file.

    Attributes:
        types: type of each token; tokens named like ends and turns are control tokens.
        ids: ids of tokens with a role, by role: bos, eos, eot, eom, unknown, padding.
        ends: ids that end a text, those given by the file first.
    """

    tokens: list[str]
    types: list[int]
    ids: Mapping[str, int]
    ends: tuple[int, ...]

    def named(self, role: str) -> str | None:
        """Return the token of a role, or None."""
        return self.tokens[self.ids[role]] if role in self.ids else None


def has_vocabulary(file: GgufFile) -> bool:
    """Return True if a file contains tokens."""
    return bool(file.metadata.get("tokenizer.ggml.tokens"))


def read_vocabulary(file: GgufFile) -> GgufVocabulary:
    """Return the tokens of a file.

    Raises:
        InvalidArgument: there are none, or their types or ids are malformed.
    """
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise InvalidArgument(str(file.path), "tokenizer.ggml.tokens must be a list of tokens")
    types = list(file.metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise InvalidArgument(str(file.path), f"has {len(types)} types for {len(tokens)} tokens")
    ids = _ids(file, len(tokens), types)
    known = {token: index for index, token in enumerate(tokens) if token in _NAMES}
    if _END_OF_SEQUENCE in known and types[known[_END_OF_SEQUENCE]] != CONTROL:
        del known[_END_OF_SEQUENCE]
    for index in known.values():
        types[index] = CONTROL
    named = [known[name] for name in (*_ENDS, _END_OF_SEQUENCE) if name in known]
    ends = dict.fromkeys([*(ids[role] for role in ("eos", "eot", "eom") if role in ids), *named])
    if _END_OF_MESSAGE in known and any(pair <= known.keys() for pair in _ENDS_OF_MESSAGES):
        types[known[_END_OF_MESSAGE]] = USER_DEFINED
        ends.pop(known[_END_OF_MESSAGE])
    return GgufVocabulary(tokens, types, ids, tuple(ends))


def _ids(file: GgufFile, num_tokens: int, types: Sequence[int]) -> dict[str, int]:
    """Return the ids of roles. An invalid id is an error for bos and eos, and ignored for others."""
    ids: dict[str, int] = {}
    if file.metadata.get("tokenizer.ggml.model") == "llama":
        ids = {role: token_id for role, token_id in _SENTENCE_PIECE.items() if token_id < num_tokens}
        if UNKNOWN in types:
            ids["unknown"] = types.index(UNKNOWN)
    for role in _ROLES:
        key = f"tokenizer.ggml.{role}_token_id"
        token_id = file.metadata.get(key)
        if token_id is None:
            continue
        if isinstance(token_id, int) and 0 <= token_id < num_tokens:
            ids[role] = token_id
        elif role in ("bos", "eos"):
            raise InvalidArgument(str(file.path), f"{key} is {token_id}; there are {num_tokens} tokens")
    return ids


_LOG = logging.getLogger(__name__)
_SPACE = "\u2581"
_DEFAULT = "default"
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_TEMPLATES = ("tokenizer.chat_template", "tokenizer.chat_template.tool_use")
_CUTTING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END_OF_WORDS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_NO_WORD = r"[^\r\n\p{L}\p{N}]?"


def _words(digits: str, behind_marks: str = r"[\r\n]*") -> str:
    return rf"{_CUTTING}|{_NO_WORD}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+{behind_marks}|{_END_OF_WORDS}"


def _cased_words(digits: str, behind: str) -> str:
    cased = f"{_NO_WORD}{_UPPER}*{_LOWER}+{behind}|{_NO_WORD}{_UPPER}+{_LOWER}*{behind}"
    return rf"{cased}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_END_OF_WORDS}"


@dataclass(frozen=True, slots=True)
class _Cut:
    """Splitting of a text into words, by consecutive expressions; GPT-2's expression is the library's.

    Attributes:
        is_gpt2: GPT-2's expression comes last.
        ignores_merges: a word that is a token becomes that token.
        adds_bos: default if the file does not specify it.
    """

    expressions: tuple[str, ...] = ()
    is_gpt2: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False


_GPT2 = _Cut(is_gpt2=True)
_DIGIT_BY_DIGIT = _Cut((r"\p{N}",), is_gpt2=True)
_LLAMA3 = _Cut((_words(r"\p{N}{1,3}"),), ignores_merges=True, adds_bos=True)
_QWEN2 = _Cut((_words(r"\p{N}"),))
_QWEN35 = _Cut(
    (rf"{_CUTTING}|{_NO_WORD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_END_OF_WORDS}",)
)
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_THREE_DIGITS = "[0-9][0-9][0-9]"
_FALCON = _Cut((r"[\p{P}$+<=>^~|`]+", _GPT2_WORDS, _THREE_DIGITS))
_UNNAMED = _Cut((r"[\p{P}$+<=>^~|]+", _GPT2_WORDS, r"\p{N}+", _THREE_DIGITS))
_GPT4O = _Cut((_cased_words(r"\p{N}{1,3}", _CUTTING + "?"),))
_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, r"\p{N}")
# DeepSeek lists cased letters individually, and these are not among them.
_UNLISTED = (
    "\u0560-\u0588\u10c7\u10cd\u10d0-\u10ff\u1c80-\u1c8a\u2d00-\u2d2d\ua790-\ua7ff\uab30-\uab68\U00010570-\U000105bc"
    "\U00010d50-\U00010d85\U00016e40-\U00016e7f\U0001d400-\U0001d7cb\U0001df00-\U0001df2a"
)
_DEEPSEEK = _Cut(
    (
        r"[\r\n]",
        rf"\s?[\p{{Lu}}\p{{Ll}}\p{{Lt}}&&[^{_UNLISTED}]]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _ASIAN,
        r"\p{N}+",
    )
)
_CUTS: Mapping[str, _Cut] = {
    **dict.fromkeys(("gpt-2", "phi-2", "jais", "trillion", "granite-docling", "mellum", "a.x-4.0"), _GPT2),
    **dict.fromkeys(("olmo", "mpt"), _GPT2),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"), _DIGIT_BY_DIGIT
    ),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Cut(_LLAMA3.expressions)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "stablelm2"), _QWEN2),
    "qwen35": _QWEN35,
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": _Cut((_cased_words(r"\p{N}", ""),), ignores_merges=True, adds_bos=True),
    "deepseek-coder": _Cut(_CODER),
    "deepseek-llm": _DEEPSEEK,
    "falcon": _FALCON,
    _DEFAULT: _UNNAMED,
    "seed-coder": _Cut((_words(r"\p{N}", ""),)),
}
"""By name in a file (`tokenizer.ggml.pre`)."""


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """The tokenizer of a GGUF file.

    Attributes:
        fast: a tokenizer of the `tokenizers` library.
        vocabulary: ids by token, without added tokens.
        special_tokens: names in chat templates, like `bos_token`.
        chat_template: its source; None without one.
        tool_chat_template: template of conversations with tools; None if the file has no separate one.
    """

    fast: Any
    vocabulary: Mapping[str, int]
    vocab_size: int
    eos_token_id: int | None
    special_tokens: Mapping[str, str]
    chat_template: str | None
    tool_chat_template: str | None = None

    def config(self) -> dict[str, object]:
        """Return the tokenizer_config.json for the library's tokenizer.json."""
        template: dict[str, object] = {} if self.chat_template is None else {"chat_template": self.chat_template}
        if self.chat_template is not None and self.tool_chat_template is not None:
            named = {"default": self.chat_template, "tool_use": self.tool_chat_template}
            template["chat_template"] = [{"name": name, "template": source} for name, source in named.items()]
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self.special_tokens,
            **template,
        }


def read_tokenizer(path: Path) -> GgufTokenizer | None:
    """Return the tokenizer of a model; None if it has none.

    Raises:
        Unsupported: it is of another kind, or its word splitting is unknown.
        InvalidArgument: a part of it is missing or malformed.
    """
    file = open_gguf(path)
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        return None
    if kind not in ("gpt2", "llama", "gemma4"):
        raise Unsupported(f"{path}: tokenizer.ggml.model is {kind!r}; supported: gpt2, llama, gemma4")
    vocabulary = read_vocabulary(file)
    tokens = vocabulary.tokens if kind == "gpt2" else _with_marked_spaces(vocabulary)
    vocab = {token: index for index, token in enumerate(tokens)}
    if kind == "gpt2":
        fast, adds_bos = _byte_level(vocab, file)
    else:
        merges = _scored_merges(vocabulary, tokens, vocab, file) if kind == "llama" else _listed_merges(file, vocab)
        fast, adds_bos = _sentence_piece(vocabulary, tokens, vocab, merges, file), True
    _add_tokens(fast, vocabulary, is_sentence_piece=kind != "gpt2", is_phi3=file.architecture == "phi3")
    _add_ends(fast, vocabulary, file, adds_bos)
    templates: list[str | None] = []
    for key in _TEMPLATES:
        template = file.metadata.get(key)
        if not isinstance(template, str | None):
            raise InvalidArgument(str(path), f"{key} must be a string")
        templates.append(template)
    named = {name: vocabulary.named(key) for name, key in _NAMED.items()}
    return GgufTokenizer(
        fast,
        vocab,
        len(vocabulary.tokens),
        vocabulary.ids.get("eos"),
        {name: token for name, token in named.items() if token is not None},
        *templates,
    )


def _byte_level(vocab: dict[str, int], file: GgufFile) -> tuple[Any, bool]:
    """Return a byte-level BPE, and the default for adding the BOS token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    pre = file.metadata.get("tokenizer.ggml.pre")
    if pre is None:
        pre = _DEFAULT
        _LOG.warning(
            "%s: tokenizer.ggml.pre is missing, so words are split by llama.cpp's default rule; convert the model "
            "again",
            file.path,
        )
    cut = _CUTS.get(str(pre))
    if cut is None:
        raise Unsupported(f"{file.path}: tokenizer.ggml.pre is {pre!r}; supported: {', '.join(_CUTS)}")
    merges = _listed_merges(file, vocab)
    fast = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=cut.ignores_merges))
    split = [pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in cut.expressions]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.is_gpt2)
    fast.pre_tokenizer = pre_tokenizers.Sequence([*split, level]) if split else level
    fast.decoder = decoders.ByteLevel()
    return fast, cut.adds_bos


def _listed_merges(file: GgufFile, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the merges in a file; the library panics at a merge that forms no token."""
    lines = file.metadata.get("tokenizer.ggml.merges")
    if not isinstance(lines, list):
        raise InvalidArgument(
            str(file.path), "tokenizer.ggml.merges is missing; convert the model again with its merges"
        )
    merges = []
    for line in lines:
        left, _, right = line[1:].partition(" ")
        left = line[:1] + left
        if not right or left not in vocab or right not in vocab or left + right not in vocab:
            raise InvalidArgument(
                str(file.path), f"tokenizer.ggml.merges has {line!r}; each entry must be two tokens that form one"
            )
        merges.append((left, right))
    return merges


def _with_marked_spaces(vocabulary: GgufVocabulary) -> list[str]:
    """Return the tokens as texts are split into them, with marks in place of spaces.

    Converters write tokens of spaces literally. User-defined ones are matched as they are, and others are words.
    """
    return [
        _SPACE * len(token) if token[:1] == " " and not token.strip(" ") and kind != USER_DEFINED else token
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
    ]


def _scored_merges(
    vocabulary: GgufVocabulary, tokens: list[str], vocab: Mapping[str, int], file: GgufFile
) -> list[tuple[str, str]]:
    """Return the merges that form each token, those with the highest score first."""
    scores = file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(vocabulary.tokens):
        raise InvalidArgument(str(file.path), "tokenizer.ggml.scores must have one number for each token")
    order = _merge_order(vocabulary.types, scores)
    pairs = find_merges(tokens, order)
    listed = _pairs(tokens, order, vocab) if pairs is None else pairs.tolist()
    return [(tokens[left], tokens[right]) for left, right in listed]


def _sentence_piece(
    vocabulary: GgufVocabulary,
    tokens: list[str],
    vocab: dict[str, int],
    merges: list[tuple[str, str]],
    file: GgufFile,
) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    if "unknown" not in vocabulary.ids:
        raise InvalidArgument(str(file.path), "tokenizer.ggml.unknown_token_id is missing")
    unknown = tokens[vocabulary.ids["unknown"]]
    fast = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    has_prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    fast.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if has_prefix else spaces
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    fast.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return fast


def _merge_order(types: list[int], scores: list[float]) -> np.ndarray:
    """Return the tokens that others form: user-defined ones first, then by score, then by index; int64."""
    kinds = np.asarray(types)
    formed = np.flatnonzero(~np.isin(kinds, (UNKNOWN, CONTROL, BYTE)))
    order: np.ndarray = formed[np.lexsort((-np.asarray(scores, np.float64)[formed], kinds[formed] != USER_DEFINED))]
    return order


def _pairs(tokens: list[str], order: np.ndarray, vocab: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    """Yield pairs of tokens as `find_merges` returns them."""
    for index in order:
        token, pairs = tokens[index], []
        for at in range(1, len(token)):
            left, right = vocab.get(token[:at]), vocab.get(token[at:])
            if left is not None and right is not None:
                pairs.append((left, right))
        yield from sorted(pairs)


def _add_tokens(fast: Any, vocabulary: GgufVocabulary, *, is_sentence_piece: bool, is_phi3: bool) -> None:
    """Add the tokens that are matched as a whole in a text.

    Those of Phi-3 include the spaces that follow.
    """
    from tokenizers import AddedToken

    bare = ("<unk>", "<s>", "<|endoftext|>")
    added = []
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if kind in (CONTROL, UNKNOWN, USER_DEFINED):
            is_special = kind != USER_DEFINED
            is_word = is_sentence_piece and not token.strip(" " + _SPACE)
            rstrip = is_phi3 and is_sentence_piece and token not in bare and not is_word
            added.append(AddedToken(token, normalized=False, special=is_special, rstrip=rstrip))
    fast.add_tokens(added)


def _add_ends(fast: Any, vocabulary: GgufVocabulary, file: GgufFile, adds_bos: bool) -> None:
    """Add the BOS and EOS tokens to texts, as the file specifies."""
    from tokenizers import processors

    ends = {
        key: vocabulary.named(key)
        for key, default in (("bos", adds_bos), ("eos", False))
        if file.metadata.get(f"tokenizer.ggml.add_{key}_token", default)
    }
    named = {key: token for key, token in ends.items() if token is not None}
    if not named:
        return
    first, last = named.get("bos"), named.get("eos")
    one = [*([first] if first is not None else []), "$A", *([last] if last is not None else [])]
    two = [*([f"{first}:1"] if first is not None else []), "$B:1", *([f"{last}:1"] if last is not None else [])]
    special = [(token, vocabulary.ids[key]) for key, token in named.items()]
    try:
        fast.post_processor = processors.TemplateProcessing(single=one, pair=[*one, *two], special_tokens=special)
    except ValueError as error:
        raise InvalidArgument(
            str(file.path), f"text cannot be encoded with {', '.join(named.values())}: {error}"
        ) from error
