"""What the packaged model writes: stories that keep to their subject, end, and repeat for a seed."""

import collections
import dataclasses
import re

import pytest

from benchmarks.demo_model.sample import CARD_PROMPTS, open_sampler, with_template
from benchmarks.demo_model.stories import lexicon

SUBJECTS = (
    "dragon",
    "fox",
    "robot",
    "baker",
    "lighthouse keeper",
    "whale",
    "princess",
    "tree",
    "ghost",
    "toaster",
    "wizard",
    "penguin",
    "cloud",
    "knight",
    "cat",
    "teapot",
    "owl",
    "pirate",
    "star",
    "mouse",
)


def stories_about(sampler, subjects):
    prompts = [with_template(f"user: Tell me a story about a {subject}.") for subject in subjects]
    return dict(zip(subjects, sampler.continue_texts(prompts, range(len(prompts))), strict=True))


def kept(stories):
    return {subject for subject, text in stories.items() if re.search(rf"\b{subject}\b", text, re.IGNORECASE)}


@pytest.fixture(scope="module")
def sampler():
    return open_sampler(temperature=0.8)


@pytest.fixture(scope="module")
def stories(sampler):
    return stories_about(sampler, SUBJECTS)


@pytest.mark.long
def test_most_stories_keep_the_subject_of_the_prompt(stories):
    assert len(kept(stories)) >= 19, set(SUBJECTS) - kept(stories)


@pytest.mark.long
def test_a_low_temperature_keeps_the_subject(sampler):
    cool = stories_about(dataclasses.replace(sampler, temperature=0.3), SUBJECTS)
    assert len(kept(cool)) >= 19, set(SUBJECTS) - kept(cool)


@pytest.mark.long
def test_stories_end_and_are_sentences_with_closed_quotes(stories):
    sound = [text for text in stories.values() if text.endswith((".", "!", "?", '"')) and text.count('"') % 2 == 0]
    assert len(sound) >= 19
    assert all(40 <= len(text.split()) <= 260 for text in sound)


def names_in(text):
    return [word for word in re.findall(r"[A-Z][a-z]+", text) if word in {*lexicon.BOYS, *lexicon.GIRLS}]


@pytest.mark.long
def test_a_name_that_is_used_is_used_again(stories):
    steady = [text for text in stories.values() if 1 not in collections.Counter(names_in(text)).values()]
    assert len(steady) >= 18


@pytest.mark.long
def test_the_pronoun_behind_a_name_is_that_of_the_name(stories):
    """As in "a robot named Leo. He lived in a dark cave."."""
    pairs = [pair for text in stories.values() for pair in re.findall(r"named (\w+)(?: who [^.]*)?\. (He|She) ", text)]
    assert len(pairs) >= 5
    wrong = [(name, pronoun) for name, pronoun in pairs if name not in (lexicon.BOYS, lexicon.GIRLS)[pronoun == "She"]]
    assert len(wrong) <= 1, wrong


@pytest.mark.long
def test_a_row_depends_on_its_own_seed_and_prompt_alone(sampler, stories):
    alone = sampler.continue_texts([with_template("user: Tell me a story about a fox."), "One day"], [1, 5])
    assert alone[0] == stories["fox"]


def test_the_prompts_of_the_model_card_are_ten_and_of_both_formats():
    assert len(CARD_PROMPTS) == 10
    assert {prompt.startswith("user: ") for prompt in CARD_PROMPTS} == {True, False}
