"""The grammar gives the same documents for the same seed, and every one of them is a sound, varied story."""

import re
from collections import Counter
from random import Random

import pytest

from benchmarks.demo_model.stories import lexicon, notation, prompts
from benchmarks.demo_model.stories.cast import Wishes, cast_for
from benchmarks.demo_model.stories.grammar import (
    ASSISTANT,
    END,
    PLOTS,
    SYSTEM,
    USER,
    document,
    introduction,
    random_story,
)
from benchmarks.demo_model.stories.lexicon import World, kind_of
from benchmarks.demo_model.stories.plots import Theme

NUM_STORIES = 1500
FIRST_DOCUMENT = (
    "<|user|>please write a spooky story about a puppet and a scientist<|assistant|>There was once a "
    "cheerful puppet named Ivan who loved to hum little tunes. He lived on a dusty shelf. One dark night, "
    'Ivan heard a strange noise. Woo, woo, it went. "Who is there?" he whispered. Nobody answered. His heart '
    'beat very fast. He wanted to hide, but then he held very still and looked. "Please do not hurt me!" '
    'cried Ivan. "Please do not hurt me," said a tiny voice. There stood a tall scientist named Opal, who '
    'looked very small. "I am Opal," she said. "I cannot sleep." Ivan laughed until his sides hurt. "I '
    'thought you were a monster!" he said. "I am afraid of monsters too," said Opal. After that, Ivan was '
    "not afraid of the dark. When he heard a noise, he only said good night to it.<|endoftext|>"
)
SPECIALS = re.compile("|".join(map(re.escape, (END, SYSTEM, USER, ASSISTANT))))


@pytest.fixture(scope="module")
def stories():
    return [random_story(Random(f"story {index}"), Wishes()) for index in range(NUM_STORIES)]


@pytest.fixture(scope="module")
def texts():
    return ["".join(span.text for span in document(5, index)) for index in range(NUM_STORIES)]


def test_a_document_is_a_function_of_seed_and_index():
    assert [document(3, index) for index in range(50)] == [document(3, index) for index in range(50)]
    assert document(3, 7) != document(4, 7)
    assert document(3, 7) != document(3, 8)


def test_the_corpus_is_the_one_the_packaged_model_was_trained_on():
    first = "".join(span.text for span in document(2024, 0))
    assert first == FIRST_DOCUMENT


def test_an_introduction_says_the_name_again_and_again():
    for index in range(100):
        (span,) = introduction(5, index)
        assert introduction(5, index) == (span,)
        hero = re.findall(r"^This is an? (.*?)\. (?:He|She) ", span.text)[0]
        called = hero.partition(" named ")[2] or f"the {hero.split(' ', 1)[-1]}"
        assert span.text.count(called.split()[-1]) >= 4, span.text
        assert re.search(r"[\[\]{}]", span.text) is None, span.text


def test_stories_differ(stories):
    assert len({story.text for story in stories}) == NUM_STORIES
    openings = Counter(" ".join(story.text.split()[:6]) for story in stories)
    assert openings.most_common(1)[0][1] < NUM_STORIES / 10
    assert {story.plot.name for story in stories} == {plot.name for plot in PLOTS}
    assert len({story.cast.hero.kind.noun for story in stories}) > 200


def test_stories_are_short_but_not_too_short(stories):
    lengths = [len(story.text.split()) for story in stories]
    assert min(lengths) >= 55
    assert max(lengths) <= 240


def test_the_hero_is_named_early_and_again_late(stories):
    for story in stories:
        sentences = story.text.split(". ")
        opening, rest = ". ".join(sentences[:3]), ". ".join(sentences[3:])
        assert story.cast.hero.kind.noun in opening, story.text
        assert story.cast.hero.called.removeprefix("the ") in rest, story.text


@pytest.mark.long
def test_every_slot_and_choice_is_filled(texts):
    for text in texts:
        assert re.search(r"[\[\]{}^]|\|(?!>)(?<!<\|)", SPECIALS.sub("", text)) is None, text


def test_quotes_are_balanced_and_spacing_is_clean(stories):
    for story in stories:
        assert story.text.count('"') % 2 == 0, story.text
        assert re.search(r"  | [,.!?]|[,.!?]{2}|\.\w", story.text) is None, story.text


def test_sentences_begin_with_a_capital(stories):
    for story in stories:
        assert story.text[0].isupper() or story.text[0] == '"'
        assert re.search(r'[.!?] [a-z]|\." [a-z]', story.text) is None, story.text


def test_articles_fit_the_next_word(stories):
    for story in stories:
        assert re.search(r"\b[Aa] (?:[aeio](?!ne\b|nce\b)|u(?!ni|se))", story.text) is None, story.text
        assert re.search(r"\b[Aa]n (?!honor)[^aeiouAEIOU]", story.text) is None, story.text


def test_two_characters_are_never_called_the_same(stories):
    assert all(story.cast.hero.called != story.cast.friend.called for story in stories)


@pytest.mark.parametrize("index", range(200))
def test_a_request_is_granted(index):
    rng = Random(f"prompt {index}")
    prompt = prompts.random_prompt(rng)
    story, wishes = random_story(rng, prompt.wishes), prompt.wishes
    if wishes.kind is not None:
        assert wishes.kind.noun in prompt.text.lower()
        assert wishes.kind.noun in story.text.lower()
    for word in (wishes.adjective, wishes.name, wishes.object_noun, wishes.choice, wishes.hobby):
        assert word.lower() in prompt.text.lower()
        assert word.lower() in story.text.lower()
    if wishes.home is not None:
        assert wishes.home.place.noun in story.text
    if wishes.friend is not None:
        assert wishes.friend.noun in story.text
    if wishes.theme and not wishes.plot and story.cast.hero.kind.world not in (World.STILL, World.SKY):
        assert wishes.theme & story.plot.themes


def test_a_hero_that_cannot_move_gets_a_plot_that_stays():
    for world in (World.STILL, World.SKY):
        for index in range(40):
            story = random_story(Random(index), Wishes(kind=lexicon.KINDS[world][index % 5]))
            assert Theme.STILL in story.plot.themes


@pytest.mark.long
def test_held_out_nouns_are_not_in_the_corpus(texts):
    nouns = {kind.noun for kinds in lexicon.KINDS.values() for kind in kinds}
    assert nouns.isdisjoint(lexicon.HELD_OUT)
    for noun in lexicon.HELD_OUT:
        assert not any(re.search(rf"\b{noun}\b", text) for text in texts), noun


def test_at_least_120_subjects_and_no_noun_twice():
    nouns = [kind.noun for kinds in lexicon.KINDS.values() for kind in kinds]
    assert len(nouns) == len(set(nouns))
    assert len(nouns) >= 120


def test_pronouns_follow_the_noun():
    for noun, pronoun in (("queen", "she"), ("king", "he")):
        for index in range(20):
            assert cast_for(Random(index), Wishes(kind=kind_of(noun, World.LAND))).hero.pronoun == pronoun


@pytest.mark.parametrize(
    ("written", "spoken"),
    [
        ('he ran. "who is there?" he asked. "me."', 'He ran. "Who is there?" he asked. "Me."'),
        ('"help!" cried the fox. "help!" the fox ran.', '"Help!" cried the fox. "Help!" The fox ran.'),
        ('"yes," said the fox, "and no." they left.', '"Yes," said the fox, "and no." They left.'),
        ('she said, "come in." it was dark.', 'She said, "Come in." It was dark.'),
    ],
)
def test_sentences_are_capitalised(written, spoken):
    assert notation.capitalise(written) == spoken


def test_articles_before_vowels():
    assert (
        notation.with_articles("a owl, a unicorn, a old one, a umbrella")
        == "an owl, a unicorn, an old one, an umbrella"
    )


def test_a_slot_without_a_word_is_refused():
    with pytest.raises(KeyError, match="colour"):
        notation.fill("a {colour} fox", {"k": "fox"})
