"""What people ask of a story teller: requests in many wordings, and the wishes that each one states."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from benchmarks.demo_model.stories import lexicon
from benchmarks.demo_model.stories.cast import Home, Wishes, random_home, random_kind
from benchmarks.demo_model.stories.lexicon import World
from benchmarks.demo_model.stories.notation import capitalise, choose, with_articles
from benchmarks.demo_model.stories.plots import Theme

MOODS = {
    "happy": Theme.HAPPY,
    "sad": Theme.SAD,
    "funny": Theme.FUNNY,
    "silly": Theme.FUNNY,
    "scary": Theme.SCARY,
    "spooky": Theme.SCARY,
    "bedtime": Theme.NIGHT,
    "good night": Theme.NIGHT,
}
TOPICS = {
    "friendship": Theme.FRIEND,
    "being a good friend": Theme.FRIEND,
    "courage": Theme.BRAVE,
    "being brave": Theme.BRAVE,
    "a contest": Theme.CONTEST,
    "a storm": Theme.STORM,
    "a long journey": Theme.JOURNEY,
    "an adventure": Theme.JOURNEY,
    "a secret": Theme.SECRET,
    "a gift": Theme.GIFT,
    "a birthday": Theme.GIFT,
    "a wish": Theme.WISH,
    "sharing": Theme.SHARING,
    "a trick": Theme.TRICK,
    "the night": Theme.NIGHT,
}
# What may follow a subject: a link, the plot it asks for, and words of that plot's choices.
_TAILS = (
    ("[who|that] is afraid of", "fear", ("the dark", "high places", "deep water", "loud noises", "thunder", "fire")),
    ("[who wants to|who cannot|who learns to]", "hero_learns", ("dance", "sing", "fly", "read", "whistle", "paint")),
    ("[who wants to win a|in a|and a]", "race", ("race", "singing contest", "dancing contest", "treasure hunt")),
    ("[and some|who has a lot of|who loves]", "sharing", ("honey", "bread", "cheese", "jam", "chocolate", "fruit")),
    ("[who makes a|and a big]", "big_cake", ("pudding", "cake", "pancake", "pie")),
)
_REQUESTS = (
    "[|please ][tell|tell me|write|write me|give me|make up] a {mood}story about {subject}.",
    "[|please ][tell me|write] a [short|little|new|nice] {mood}story about {subject}.",
    "[can|could] you [tell|tell me|write|write me|make up] a [|short ]{mood}story about {subject}?",
    "[I want|I would like|I'd like|I want to hear] a {mood}story about {subject}[|, please].",
    "[do you know|have you got] a {mood}story about {subject}?",
    "a {mood}story about {subject}[|, please].",
    "write a story with {subject} in it.",
    "my child wants a {mood}story about {subject}.",
)
_OPEN_REQUESTS = (
    "[|please ][tell|tell me|write|write me|give me|make up] a [|short |new ]{mood}story[|, please].",
    "[can|could] you [tell me|write] a [|short ]{mood}story?",
    "I want [a {mood}story|to hear a {mood}story][|, please].",
)
SYSTEMS = (
    "You are a story teller.",
    "You tell short stories for children.",
    "You are a helpful assistant.",
    "You write stories.",
    "Answer every request with a short story.",
)
SMALL_TALK = (
    ("[hello|hi|hi there|hey|good morning|good evening][.|!]", "hello! What story would you like to hear?"),
    ("[how are you|how are you today]?", "I am well, thank you. Shall I tell you a story?"),
    (
        "[who are you|what are you|what can you do|what is this][?|]",
        "I am a very small model that tells short stories. Ask me for a story about anything you like.",
    ),
    ("[thank you|thanks|thank you, that was nice|I liked that][.|!]", "you are welcome! Would you like another story?"),
    ("[help|help me][.|]", 'ask me for a story. For example, "Tell me a story about a fox who lives by the sea."'),
    ("[bye|goodbye|good night][.|!]", "good night, and sweet dreams!"),
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The words of a request and what they ask for."""

    text: str
    wishes: Wishes


def random_prompt(rng: Random) -> Prompt:
    """A request for a story."""
    wishes, subject = _subject(rng)
    mood = ""
    if not wishes.theme and rng.random() < 0.3 and not wishes.object_noun:
        mood = rng.choice(tuple(MOODS))
        wishes = replace(wishes, theme=MOODS[mood], is_bedtime=MOODS[mood] == Theme.NIGHT)
    requests = _REQUESTS if subject else _OPEN_REQUESTS
    text = choose(rng, rng.choice(requests)).replace("{mood}", f"{mood} " if mood else "").replace("{subject}", subject)
    if subject and rng.random() < 0.05:
        text = subject if not mood else f"{mood} story about {subject}"
    text = with_articles(text)
    if rng.random() < 0.15:
        return Prompt(text.rstrip("."), wishes)
    return Prompt(capitalise(text), wishes)


def small_talk(rng: Random) -> tuple[str, str]:
    """Something that is not a request for a story, and an answer."""
    question, answer = rng.choice(SMALL_TALK)
    question = choose(rng, question)
    return question if rng.random() < 0.3 else capitalise(question), capitalise(answer)


def _subject(rng: Random) -> tuple[Wishes, str]:
    roll = rng.random()
    if roll < 0.05:
        return Wishes(), ""
    if roll < 0.11:
        topic = rng.choice(tuple(TOPICS))
        return Wishes(theme=TOPICS[topic]), topic
    if roll < 0.14:
        return Wishes(theme=Theme.PAIR), rng.choice(("two friends", "two best friends", "two good friends"))
    kind = random_kind(rng)
    adjective = rng.choice(lexicon.KIND_ADJECTIVES) if rng.random() < 0.4 else ""
    wishes = Wishes(kind=kind, adjective=adjective)
    noun = f"a {adjective} {kind.noun}" if adjective else f"a {kind.noun}"
    if kind.noun in ("sun", "moon", "wind"):
        noun = noun.replace("a ", "the ", 1)
    roll = rng.random()
    if roll < 0.36:
        return wishes, noun
    if roll < 0.40 and noun.startswith("a ") and kind.noun[-1] not in "fhosxyz":
        return wishes, noun[2:] + "s"
    if roll < 0.50 and kind.world not in (World.STILL, World.SKY):
        return _with_plot(rng, wishes, noun)
    if roll < 0.60:
        return _with_name(rng, wishes, noun)
    if roll < 0.78:
        return _with_home(rng, wishes, noun)
    if roll < 0.90 or kind.world in (World.STILL, World.SKY):
        friend = random_kind(rng, World.SEA if kind.world is World.SEA else World.LAND)
        if friend.noun == kind.noun:
            return wishes, noun
        link = rng.choice(("and a", "and a", "and a", "who meets a", "and a friendly"))
        return replace(wishes, friend=friend), f"{noun} {link} {friend.noun}"
    if roll < 0.97:
        thing = rng.choice([noun for noun in lexicon.OBJECTS if noun != kind.noun])
        link = rng.choice(("and a", "and a", "who has a", "with a"))
        return replace(wishes, object_noun=thing), f"{noun} {link} {thing}"
    topic = rng.choice(("a storm", "a secret", "a wish", "a trick"))
    return replace(wishes, theme=TOPICS[topic]), f"{noun} and {topic}"


def _with_plot(rng: Random, wishes: Wishes, noun: str) -> tuple[Wishes, str]:
    if rng.random() < 0.3 and wishes.kind is not None:
        hobby = rng.choice(lexicon.HOBBIES[wishes.kind.world])
        return replace(wishes, hobby=hobby), f"{noun} who {rng.choice(('loves', 'likes'))} to {hobby}"
    link, plot, choices = rng.choice(_TAILS)
    choice = rng.choice(choices)
    return replace(wishes, plot=plot, choice=choice), f"{noun} {choose(rng, link)} {choice}"


def _with_name(rng: Random, wishes: Wishes, noun: str) -> tuple[Wishes, str]:
    gender = wishes.kind.gender if wishes.kind else ""
    pool = {"he": lexicon.BOYS, "she": lexicon.GIRLS}.get(gender, lexicon.BOYS + lexicon.GIRLS)
    name = rng.choice(pool)
    return replace(wishes, name=name), f"{noun} {rng.choice(('named', 'called'))} {name}"


def _with_home(rng: Random, wishes: Wishes, noun: str) -> tuple[Wishes, str]:
    world = wishes.kind.world if wishes.kind else World.LAND
    home = random_home(rng, world)
    if rng.random() < 0.5:
        home = Home(home.place, "")
    preposition = home.place.preposition
    link = rng.choice((preposition, f"who lives {preposition}", f"that lives {preposition}", "and"))
    return replace(wishes, home=home), f"{noun} {link} {home.phrase}"
