"""The story grammar: every document the demo model is trained on is a function of a seed and an index.

    wishes -> cast -> plot -> one way for every beat -> words for the slots -> capitals, articles

A document is a list of spans; the model learns to write some of them (stories, answers) and only reads the others
(requests).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from benchmarks.demo_model.stories import prompts
from benchmarks.demo_model.stories.cast import Cast, Wishes, cast_for, made_up_kind, slots_of
from benchmarks.demo_model.stories.lexicon import World
from benchmarks.demo_model.stories.notation import capitalise, choose, fill, with_articles
from benchmarks.demo_model.stories.plots import Plot, Theme
from benchmarks.demo_model.stories.plots_heart import HEARTS
from benchmarks.demo_model.stories.plots_journey import JOURNEYS
from benchmarks.demo_model.stories.plots_laughter import LAUGHTER

PLOTS: tuple[Plot, ...] = JOURNEYS + HEARTS + LAUGHTER

END, PAD, SYSTEM, USER, ASSISTANT = "<|endoftext|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"

_OPENINGS = (
    "once upon a time, there [was|lived] {A} who lived {home}.",
    "once upon a time, {home}, there [was|lived] {A}.",
    "once upon a time, there was {A}.",
    "once upon a time, {A} lived {home}.",
    "long ago, there [was|lived] {A}.",
    "long, long ago, {home}, there lived {A}.",
    "there was once {A} who lived {home}.",
    "there was once {A} who loved to {hobby}.",
    "there once was {A}.",
    "{home} there [lived|once lived] {A}.",
    "{home}, there [was|lived] {A}.",
    "{A} lived {home}.",
    "this is the story of {A}.",
    "one day, {A} came to live {home}.",
    "one {season}, {A} came to live {home}.",
    "not so long ago, {A} lived {home}.",
    "far, far away, {home}, lived {A}.",
    "in a time of kings and castles, there lived {A}.",
    "a long time ago, there [was|lived] {A} who [liked|loved] to {hobby}.",
)
_NAMED_OPENINGS = (
    "{N} was {A0} who lived {home}.",
    "{N} was {A0}.",
    "{N} was no ordinary {k}.",
    "everyone {home_in} knew {N} the {k}.",
    "have you ever heard of {N}, {A0} who lived {home}?",
)
_TRAITS = (
    "{he} [loved|liked] to {hobby}.",
    "every {time}, {he} would {hobby}.",
    "most of all, {he} [loved|liked] to {hobby}.",
    "{N} was never happier than when {he} could {hobby}.",
    "all day long, {he} would {hobby}.",
    "everyone {home_in} liked {him}.",
    "there was no other {k} like {him}.",
)
_PAIR_OPENINGS = (
    "once upon a time, there were two [good |]friends, {A} and {B}.",
    "once upon a time, {A} and {B} lived {home}.",
    "long ago, there lived {A} and {B}, and they were [best friends|good friends].",
    "{home} there lived two friends, {A} and {B}.",
    "{A} and {B} were the best of friends.",
    "there was once {A} who had a friend, {B}.",
    "one day, {A} met {B}, and [soon they were|they became] friends.",
)
_PAIR_TRAITS = (
    "{N} liked to {hobby}, and {M} liked to sleep late.",
    "they did everything together.",
    "where one of them was, the other was never far away.",
    "{N} talked a lot, and {M} listened.",
)
# What `introduction` says of a character; the name comes again and again, a few words apart.
_FACTS = (
    "{N} lives {home}.",
    "{N} [likes|loves] to {hobby}.",
    "{N} has a {obj}.",
    "every {time}, {N} sings.",
    "{N} is [never|often|sometimes] [sad|late|hungry].",
    '"[hello|good {time}]," says {N}.',
    '"where is {N}?" asks {M}.',
    "once, {N} went to {far}.",
    "everyone {home_in} knows {N}.",
    "{M} and {N} are friends.",
    "one {weather} {time}, {N} was alone.",
    "{N}'s {o} is {his} favorite thing.",
    '"thank you, {call}," said {M}.',
    "{N} [smiled|laughed|nodded] and {M} [smiled|laughed|nodded].",
    "then {N} [went home|fell asleep].",
)
_CLOSINGS = ("the end.", "the end.", "and that is the end of the story.", "and so the story ends.")
_BEDTIME_CLOSINGS = (
    "that night, {N} [closed {his} eyes|lay down] and slept until morning. good night.",
    "and then it was time to sleep. good night, {call}, and good night to you.",
    "the moon came up over {home_the}, and {N} fell asleep with a smile.",
    "now close your eyes, just like {N}. sleep well.",
)


@dataclass(frozen=True, slots=True)
class Story:
    """A finished story and what it is made of."""

    text: str
    cast: Cast
    plot: Plot


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a document; `is_learnt` says whether the model is trained to write it."""

    text: str
    is_learnt: bool


def random_story(rng: Random, wishes: Wishes) -> Story:
    """A story that grants the wishes."""
    cast = cast_for(rng, wishes)
    plot = rng.choice(_plots_for(cast, wishes))
    slots = slots_of(rng, cast)
    if plot.names:
        rows = [row for row in plot.choices if not any(cast.hero.kind.noun in word for word in row)]
        rows = [row for row in rows if row[0] == wishes.choice] or rows
        slots.update(zip(plot.names, rng.choice(rows), strict=True))
    lines = _opening(rng, cast, plot, wishes)
    lines += [rng.choice(beat) for beat in plot.beats]
    if wishes.is_bedtime and plot.name != "cannot_sleep":
        lines.append(rng.choice(_BEDTIME_CLOSINGS))
    elif rng.random() < 0.2:
        lines.append(rng.choice(_CLOSINGS))
    text = fill(" ".join(choose(rng, line) for line in lines), slots)
    return Story(capitalise(with_articles(text)), cast, plot)


def document(seed: int, index: int) -> tuple[Span, ...]:
    """Document number `index` of the corpus of this seed: a chat, or a story alone."""
    rng = Random(f"{seed}:{index}")
    if rng.random() < 0.25:
        return (Span(random_story(rng, Wishes(is_bedtime=rng.random() < 0.1)).text + END, True),)
    spans = []
    if rng.random() < 0.1:
        spans.append(Span(SYSTEM + rng.choice(prompts.SYSTEMS), False))
    for _ in range(2 if rng.random() < 0.12 else 1):
        if rng.random() < 0.02:
            question, answer = prompts.small_talk(rng)
        else:
            prompt = prompts.random_prompt(rng)
            question, answer = prompt.text, random_story(rng, prompt.wishes).text
        spans += [Span(USER + question + ASSISTANT, False), Span(answer + END, True)]
    return tuple(spans)


def introduction(seed: int, index: int) -> tuple[Span, ...]:
    """An exercise in keeping names: two characters introduced, and some facts about them, in any order."""
    rng = Random(f"introduction {seed}:{index}")
    cast = cast_for(rng, Wishes(kind=made_up_kind(rng) if rng.random() < 0.3 else None))
    lines = ["this is {A}.", "{he} has a friend, {B}.", *rng.sample(_FACTS, 6)]
    text = fill(" ".join(choose(rng, line) for line in lines), slots_of(rng, cast))
    return (Span(capitalise(with_articles(text)) + END, True),)


def documents(seed: int, start: int = 0) -> Iterator[tuple[Span, ...]]:
    """The corpus of a seed, from document `start` on, without an end."""
    index = start
    while True:
        yield document(seed, index)
        index += 1


def _plots_for(cast: Cast, wishes: Wishes) -> list[Plot]:
    """The plots that this cast can play, narrowed to the theme asked for where one of them has it."""
    if wishes.plot:
        return [plot for plot in PLOTS if plot.name == wishes.plot]
    plots = [plot for plot in PLOTS if _can_play(plot, cast, wishes)]
    return [plot for plot in plots if wishes.theme & plot.themes] or plots


def _can_play(plot: Plot, cast: Cast, wishes: Wishes) -> bool:
    if cast.hero.kind.world in (World.STILL, World.SKY) and Theme.STILL not in plot.themes:
        return False
    if wishes.friend is not None and not plot.has_friend:
        return False
    return not wishes.object_noun or Theme.OBJECT in plot.themes


def _opening(rng: Random, cast: Cast, plot: Plot, wishes: Wishes) -> list[str]:
    is_pair = Theme.PAIR in plot.themes
    traits: tuple[str, ...] = _PAIR_TRAITS if is_pair else _TRAITS
    if is_pair:
        first = rng.choice(_PAIR_OPENINGS)
    else:
        first = rng.choice(_NAMED_OPENINGS if cast.hero.name and rng.random() < 0.25 else _OPENINGS)
    if "A}" not in first and "{A0}" not in first and cast.hero.adjective:
        first += f" {{he}} was a {cast.hero.adjective} {{k}}."
    if "{home" not in first:
        first += " they lived {home}." if is_pair else " {he} lived {home}."
    if wishes.hobby and "{hobby}" not in first:
        return [first, "{N} [loved|liked] to {hobby}."]
    if "{hobby}" in first or rng.random() < 0.4:
        return [first]
    return [first, rng.choice(traits)]
