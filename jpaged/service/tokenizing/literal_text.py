"""Treats special tokens in users' text as plain text, with a twin tokenizer whose special tokens are renamed.

    message      a <|end|> b             <|end|> written by a user
    marked       a <#|end|> b            # is a mark that no user can guess
    rendered     <|user|>a <#|end|> b    <|user|> written by the chat template
    unmarked     <#7>a <|end|> b         7 is the id of <|user|>, <#7> its name in the twin
    tokenized    7, a, <, |, end, |>, b

The text is tokenized as a whole, so users' text is split as in any other text.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

from jpaged import json_text
from jpaged.errors import Unsupported

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""Noncharacters: reserved for internal use, and not trimmed or changed by templates."""


class LiteralText:
    """The tokenizer's twin, and the marks in messages.

    Args:
        tokenizer: a `tokenizers.Tokenizer`; it is not changed.

    Attributes:
        tokenizer: the twin: the same ids, with special tokens under names that no user can guess.

    Raises:
        Unsupported: a special token cannot be renamed without changing its id.
    """

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers import Tokenizer

        nonce = str(secrets.randbits(64))  # digits: no template changes their case
        self._mark = f"{_OPEN}{nonce}{_CLOSE}"
        written = json.loads(tokenizer.to_str())
        special = {token["content"]: token["id"] for token in written["added_tokens"] if token["special"]}
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

    def unmarked(self, text: str) -> str:
        """Remove the marks from rendered text, and rename the template's special tokens to the twin's names."""
        return self._special.sub(lambda found: self._names[found[0]], text).replace(self._mark, "")


def _rename(written: dict[str, Any], names: dict[str, str]) -> None:
    """Rename the special tokens of a tokenizer.json wherever they are named and not numbered."""
    for token in written["added_tokens"]:
        if token["special"]:
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
