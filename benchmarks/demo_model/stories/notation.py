"""The notation of the story grammar: choices, slots, and what makes a sentence of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from random import Random

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{(\w+)\}")
# "an" before a vowel that is heard: "a unicorn", "a one-eyed cat", "a useful thing".
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeioAEIO](?!ne\b|nce\b)|[uU](?!ni|se))")
_SPEECH = r"(?:said|says|asks|asked|cried|called|whispered|shouted|wondered|thought|begged|guessed|roared)\b"
# A speech tag behind a quoted question or exclamation goes on in lower case: "who is there?" she asked.
_TAG = re.compile(rf"(?:{_SPEECH}|(?:[\w'-]+ ){{1,4}}?{_SPEECH})")


def choose(rng: Random, text: str) -> str:
    """Resolve every `[a|b]` by chance."""
    while (match := _CHOICE.search(text)) is not None:
        text = text[: match.start()] + rng.choice(match[1].split("|")) + text[match.end() :]
    return text


def fill(text: str, slots: Mapping[str, str]) -> str:
    """Resolve every `{slot}`, also those inside the words that slots stand for.

    Raises:
        KeyError: a slot has no word.
    """
    while _SLOT.search(text) is not None:
        text = _SLOT.sub(lambda match: slots[match[1]], text)
    return text


def with_articles(text: str) -> str:
    """Turn "a" into "an" where the next word begins with the sound of a vowel."""
    return _ARTICLE.sub(r"\1n ", text)


def capitalise(text: str) -> str:
    """Begin every sentence with a capital, inside quotes and outside."""
    out: list[str] = []
    starts, is_quoted, is_interrupted = True, False, False
    for index, letter in enumerate(text):
        if letter == '"':
            is_quoted = not is_quoted
            starts = not is_interrupted if is_quoted else _ends_sentence(text, index)
            # "yes," said the fox, "and no." is one sentence
            is_interrupted = not is_quoted and text[index - 1] == ","
        elif letter in ".!?":
            starts, is_interrupted = True, False
        elif letter.isalnum():
            out.append(letter.upper() if starts else letter)
            starts = False
            continue
        elif letter == ",":
            starts = False
        out.append(letter)
    return "".join(out)


def _ends_sentence(text: str, quote: int) -> bool:
    if text[quote - 1] in "?!":
        return _TAG.match(text, quote + 2) is None
    return text[quote - 1] == "."
