"""Who and what a story is about: the wishes of a request, completed by chance to a full cast."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from benchmarks.demo_model.stories import lexicon
from benchmarks.demo_model.stories.lexicon import Kind, Place, World
from benchmarks.demo_model.stories.plots import Theme

_PRONOUNS = {"he": ("he", "him", "his", "himself"), "she": ("she", "her", "her", "herself")}
_ALL_LAND = lexicon.KINDS[World.LAND]
_LAND_ANIMALS = tuple(kind for kind in _ALL_LAND if kind.noun in set(lexicon.ANIMALS))


@dataclass(frozen=True, slots=True)
class Home:
    """A place with the adjective that this story gives it; an empty adjective leaves it out."""

    place: Place
    adjective: str

    @property
    def phrase(self) -> str:
        """As in "a deep forest"."""
        return f"a {self.adjective} {self.place.noun}" if self.adjective else f"a {self.place.noun}"


@dataclass(frozen=True, slots=True)
class Character:
    """One character; an empty name or adjective leaves it out."""

    kind: Kind
    adjective: str
    name: str
    pronoun: str

    @property
    def described(self) -> str:
        """As in "brave fox named Pip", without its article."""
        noun = f"{self.adjective} {self.kind.noun}" if self.adjective else self.kind.noun
        return f"{noun} named {self.name}" if self.name else noun

    @property
    def called(self) -> str:
        """How the story calls it after the introduction."""
        return self.name or f"the {self.kind.noun}"


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a request asks for; None and empty are left to chance.

    `plot` and `choice` name a plot and the first word of one row of its choices.
    """

    kind: Kind | None = None
    adjective: str = ""
    name: str = ""
    friend: Kind | None = None
    home: Home | None = None
    object_noun: str = ""
    theme: Theme = field(default=Theme(0))
    is_bedtime: bool = False
    hobby: str = ""
    plot: str = ""
    choice: str = ""


@dataclass(frozen=True, slots=True)
class Cast:
    """Everybody and everything that a story keeps from its first sentence to its last."""

    hero: Character
    friend: Character
    home: Home
    object_adjective: str
    object_noun: str
    hobby: str


def random_kind(rng: Random, world: World | None = None) -> Kind:
    """A kind of the given world, or of any; one in ten is a made-up word, so that subjects are copied."""
    if world is None:
        if rng.random() < 0.1:
            return made_up_kind(rng)
        world = rng.choices(tuple(World), weights=(60, 6, 22, 7, 4))[0]
    return rng.choice(lexicon.KINDS[world])


def made_up_kind(rng: Random) -> Kind:
    """A noun that no dictionary has, such as "snizzle" or "blumporn"."""
    count = rng.choice((1, 2))
    noun = "".join(rng.choice(lexicon.SYLLABLE_ONSETS) + rng.choice(lexicon.SYLLABLE_RIMES) for _ in range(count))
    return Kind(noun, World.LAND)


def random_home(rng: Random, world: World) -> Home:
    """A home in this world."""
    place = rng.choice(lexicon.HOMES[world])
    return Home(place, rng.choice(place.adjectives))


def cast_for(rng: Random, wishes: Wishes) -> Cast:
    """Complete the wishes to a cast."""
    kind = wishes.kind or random_kind(rng)
    hero = _character(rng, kind, wishes.adjective or _maybe(rng, 0.7, lexicon.KIND_ADJECTIVES), wishes.name, "")
    friend_kind = wishes.friend or _friend_kind(rng, kind)
    adjective = _maybe(rng, 0.7, lexicon.FRIEND_ADJECTIVES)
    friend = _character(rng, friend_kind, "" if adjective == hero.adjective else adjective, "", hero.pronoun)
    while friend.name and friend.name == hero.name:
        friend = _character(rng, friend_kind, friend.adjective, "", hero.pronoun)
    if friend.called == hero.called:
        friend = Character(friend.kind, friend.adjective, _name(rng, friend.pronoun), friend.pronoun)
    nouns = tuple(noun for noun in lexicon.OBJECTS if noun not in (kind.noun, friend_kind.noun))
    return Cast(
        hero=hero,
        friend=friend,
        home=wishes.home or random_home(rng, kind.world),
        object_adjective=rng.choice(lexicon.OBJECT_ADJECTIVES),
        object_noun=wishes.object_noun or rng.choice(nouns),
        hobby=wishes.hobby or rng.choice(lexicon.HOBBIES[kind.world]),
    )


def slots_of(rng: Random, cast: Cast) -> dict[str, str]:
    """The words that the slots of every plot stand for."""
    hero, friend, world = cast.hero, cast.friend, cast.hero.kind.world
    he, him, his, himself = _PRONOUNS[hero.pronoun]
    fhe, fhim, fhis, fhimself = _PRONOUNS[friend.pronoun]
    preposition, noun = cast.home.place.preposition, cast.home.place.noun
    return {
        "A": f"a {hero.described}",
        "A0": f"a {hero.adjective} {hero.kind.noun}" if hero.adjective else f"a {hero.kind.noun}",
        "B": f"a {friend.described}",
        "N": hero.called,
        "call": hero.name or hero.kind.noun,
        "k": hero.kind.noun,
        "he": he,
        "him": him,
        "his": his,
        "himself": himself,
        "f": friend.described,
        "M": friend.called,
        "fcall": friend.name or friend.kind.noun,
        "M2": friend.name or f"only a {friend.kind.noun}",
        "fhe": fhe,
        "fhim": fhim,
        "fhis": fhis,
        "fhimself": fhimself,
        "they_two": f"{hero.called} and {friend.called}",
        "the_two": "the two friends",
        "home": f"{preposition} {cast.home.phrase}",
        "home_in": f"{preposition} the {noun}",
        "home_the": f"the {noun}",
        "obj": f"{cast.object_adjective} {cast.object_noun}",
        "o": cast.object_noun,
        "hobby": cast.hobby,
        "weather": rng.choice(lexicon.WEATHER),
        "time": rng.choice(lexicon.TIMES),
        "time2": rng.choice(("evening", "morning", "day", "night")),
        "season": rng.choice(lexicon.SEASONS),
        "far": _not_naming(rng, lexicon.FAR[world], noun),
        "hide": rng.choice(lexicon.HIDE[world]),
        "enemy": _not_naming(rng, lexicon.ENEMIES[world], hero.kind.noun),
        "obst": _not_naming(rng, lexicon.OBSTACLES[world], noun),
    }


def _not_naming(rng: Random, phrases: tuple[str, ...], noun: str) -> str:
    return rng.choice([phrase for phrase in phrases if noun not in phrase])


def _friend_kind(rng: Random, kind: Kind) -> Kind:
    pool = {
        World.LAND: _ALL_LAND if rng.random() < 0.3 else _LAND_ANIMALS,
        World.SEA: lexicon.KINDS[World.SEA],
        World.HOUSE: lexicon.KINDS[World.HOUSE] if rng.random() < 0.6 else _LAND_ANIMALS,
        World.STILL: _LAND_ANIMALS,
        World.SKY: _LAND_ANIMALS,
    }[kind.world]
    return rng.choice([other for other in pool if other.noun != kind.noun])


def _character(rng: Random, kind: Kind, adjective: str, name: str, other_pronoun: str) -> Character:
    pronoun = kind.gender or {"he": "she", "she": "he"}.get(other_pronoun) or rng.choice(("he", "she"))
    if name:
        pronoun = kind.gender or ("he" if name in lexicon.BOYS else "she")
    elif rng.random() < 0.75:
        name = _name(rng, pronoun)
    return Character(kind, adjective, name, pronoun)


def _name(rng: Random, pronoun: str) -> str:
    return rng.choice(lexicon.BOYS if pronoun == "he" else lexicon.GIRLS)


def _maybe(rng: Random, chance: float, words: tuple[str, ...]) -> str:
    return rng.choice(words) if rng.random() < chance else ""
