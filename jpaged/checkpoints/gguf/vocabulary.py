"""The tokens of a GGUF file, their types, and the tokens that end a text.

Converters have given many tokens a wrong type, and many files have no id for the end of a turn. So llama.cpp recognizes
such tokens by name, and so does this module. It does not tokenize text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jpaged.checkpoints.gguf.file import GgufFile
from jpaged.errors import InvalidArgument

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
class Vocabulary:
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


def read_vocabulary(file: GgufFile) -> Vocabulary:
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
    return Vocabulary(tokens, types, ids, tuple(ends))


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
