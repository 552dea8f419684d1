"""Every format reads the answers of `call_samples`, however they are cut, and loses nothing of random ones."""

import itertools
import json
import random
import re

import pytest

from jpaged.chat import ChatAnswer
from jpaged.service.chat.formats import REASONING_FORMATS, TOOL_FORMATS, AnswerFormat
from jpaged.service.chat.output_parser import HarmonyParser
from jpaged.service.chat.tool_parser import PieceWriter
from tests.service.chat.call_samples import SCHEMAS, WRITERS, samples

SAMPLES = {name: list(samples(name)) for name in TOOL_FORMATS}


def answer(name, *texts):
    count = itertools.count()
    one = TOOL_FORMATS[name].make(PieceWriter(lambda: f"id{next(count)}", SCHEMAS))
    return ChatAnswer.of([piece for text in texts for piece in one.push(text)] + one.finish())


def test_every_format_has_a_writer_and_sixty_samples():
    assert WRITERS.keys() == TOOL_FORMATS.keys()
    assert {name: len(found) for name, found in SAMPLES.items() if len({one.text for one in found}) < 60} == {}


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_samples_are_read_as_they_were_written(name):
    for sample in SAMPLES[name]:
        found = answer(name, sample.text)
        given = [
            call.arguments if isinstance(wanted, str) else json.loads(call.arguments)
            for call, wanted in zip(found.tool_calls, sample.arguments, strict=True)
        ]
        names = tuple(call.name for call in found.tool_calls)
        assert (found.content, names, given) == (sample.content, sample.names, [*sample.arguments]), sample.text


def check_splits(name, number_of_samples):
    """Every sample comes a character at a time, and some in two parts, split at every place."""
    for number, sample in enumerate(SAMPLES[name]):
        whole = answer(name, sample.text)
        assert answer(name, *sample.text) == whole, sample.text
        if number % (len(SAMPLES[name]) // number_of_samples or 1) == 0:
            for at in range(1, len(sample.text)):
                assert answer(name, sample.text[:at], sample.text[at:]) == whole, (sample.text[:at], sample.text[at:])


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_samples_are_the_same_a_character_at_a_time(name):
    check_splits(name, 3)


@pytest.mark.long
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_samples_are_the_same_split_at_every_character(name):
    check_splits(name, len(SAMPLES[name]))


WORDS = re.compile(r"w\d+w")


def fuzzed(rng, name, thoughts):
    """A text of markup, calls and words in any order; each word occurs once."""
    markup = [
        *TOOL_FORMATS[name].texts,
        *thoughts,
        *"{}[]()<>=:,;\"'",
        "\\",
        "\n",
        " ",
        "find",
        "city",
        "null",
        "1",
        "\U0001f600",
    ]
    parts = []
    for number in range(rng.randrange(1, 24)):
        kind = rng.random()
        if kind < 0.35:
            parts.append(f"w{number}w")
        elif kind < 0.45:
            text = rng.choice(SAMPLES[name]).text
            parts.append(text[: rng.randrange(len(text) + 1)])
        else:
            parts.append(rng.choice(markup).replace("NAME", "find").replace("INDEX", "0"))
    return "".join(parts)


def check_fuzzed(seed, name, num_texts):
    """Texts are the same in random parts, none raises, and no word is lost, except in heads of gpt-oss's messages."""
    rng = random.Random(f"{seed} {name}")
    for _ in range(num_texts):
        reasoning = rng.choice([None, *REASONING_FORMATS.values()])
        thoughts = () if reasoning is None else (reasoning.open_tag, reasoning.close_tag)
        one = AnswerFormat(TOOL_FORMATS[name], reasoning)
        text, is_open = fuzzed(rng, name, thoughts), rng.random() < 0.3
        cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randrange(12))))
        parts = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
        found = []
        for pieces in ([text], parts):
            count = itertools.count()
            parser = one.parser(is_open=is_open, new_id=lambda count=count: f"id{next(count)}", schemas=SCHEMAS)
            found.append(ChatAnswer.of([x for piece in pieces for x in parser.push(piece)] + parser.finish()))
        assert found[0] == found[1], (text, parts)
        lost = set(WORDS.findall(text)) - set(WORDS.findall(str(found[0])))
        assert not lost or isinstance(parser, HarmonyParser), (name, text, lost, found[0])


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_random_texts_never_raise_and_lose_nothing(name):
    check_fuzzed(0, name, 5000 // len(TOOL_FORMATS) + 1)


@pytest.mark.long
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_many_random_texts_never_raise_and_lose_nothing(name):
    check_fuzzed(1, name, 5000)
