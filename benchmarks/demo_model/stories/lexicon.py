"""The words of the story grammar: who, where, what, and how they feel.

Every list is plain text split once at import, so that a new word is one word more in a string. The lists know nothing of
plots or sentences.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class World(Enum):
    """Where a character lives; it decides homes, places to reach and ways to get there."""

    LAND = "land"
    SEA = "sea"
    HOUSE = "house"
    STILL = "still"
    SKY = "sky"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of character, such as "fox" or "lighthouse keeper".

    Attributes:
        noun: the bare noun, without an article.
        world: where it lives.
        gender: "he" or "she" where the noun decides it, "" where either fits.
    """

    noun: str
    world: World
    gender: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """A place to live in: `preposition` a `adjective` `noun`, as in "beside a wide river"."""

    preposition: str
    adjectives: tuple[str, ...]
    noun: str


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.replace("\n", " ").split(",") if word.strip())


PEOPLE = _words("""baker, lighthouse keeper, sailor, farmer, fisherman, teacher, gardener, carpenter, tailor, shepherd,
miller, painter, musician, clockmaker, shoemaker, nurse, doctor, cook, knight, pirate, explorer, scientist, astronaut,
inventor, librarian, singer, dancer, clown, beekeeper, toymaker, potter, blacksmith, mapmaker, captain, firefighter,
pilot, detective, student, poet, magician, candle maker, merchant, hunter, traveler, acrobat, goldsmith, ferryman,
storyteller, chef, woodcutter, king, queen, prince, princess, boy, girl, grandmother, grandfather, wizard, witch, child,
neighbor, drummer, weaver, train driver, bus driver, dentist, barber, mayor, guard, soldier, ninja, superhero""")
ANIMALS = _words("""fox, bear, rabbit, mouse, hedgehog, squirrel, deer, wolf, badger, cat, dog, kitten, puppy, horse,
pony, donkey, cow, goat, sheep, lamb, pig, lion, tiger, elephant, giraffe, monkey, zebra, panda, koala, kangaroo, camel,
hippo, rhino, tortoise, snail, frog, toad, lizard, snake, mole, beaver, raccoon, skunk, hamster, moose, porcupine, ant,
beetle, spider, caterpillar, worm, owl, robin, sparrow, crow, raven, eagle, parrot, penguin, duck, goose, hen, rooster,
peacock, seagull, stork, pigeon, butterfly, bee, moth, firefly, ladybug, bat, dragonfly, chicken, bunny, bull, reindeer,
cricket, gorilla, cheetah, crocodile, bird, duckling, piglet, bear cub, dinosaur, polar bear, rat, woodpecker, swan""")
MAGIC = _words("""dragon, unicorn, fairy, elf, giant, troll, ghost, goblin, gnome, phoenix, griffin, monster, robot,
alien, vampire, ogre, pixie, werewolf, zombie, skeleton, imp""")
SEA = _words("""whale, dolphin, fish, goldfish, shark, octopus, crab, seal, starfish, seahorse, jellyfish, lobster,
mermaid, squid, sea turtle, shrimp, swordfish, stingray, eel, sea dragon""")
HOUSE = _words("""toaster, lamp, clock, teapot, umbrella, broom, pencil, book, piano, violin, drum, bell, chair, candle,
lantern, balloon, shoe, sock, hat, spoon, cup, doll, teddy bear, puppet, pillow, blanket, mirror, key, table, fridge,
computer, banana, cupcake, pizza, cookie, lemon, onion, tomato, potato, carrot, apple, button, bottle, ladder, hammer,
guitar, trumpet, radio, telephone, camera, suitcase, backpack, sofa, carpet, vase, fork, plate, toy train, toy soldier,
music box, paper boat, pancake, cake, egg, jar, needle, paintbrush, crayon, ball, marble, coin, glove, scarf, coat,
bicycle, sandwich, pumpkin, cheese, pear, orange, bucket, basket, puzzle, yo-yo, vacuum cleaner, dishwasher""")
STILL = _words("""tree, lighthouse, windmill, statue, flower, rose, sunflower, mushroom, cactus, stone, mountain, river,
bridge, scarecrow, snowman, house, castle, oak, tower, well, pine tree, apple tree, bench, fountain, daisy, hill, garden,
bakery, tulip, old barn, volcano""")
SKY = _words("cloud, star, moon, sun, wind, snowflake, raindrop, rainbow, comet, planet")

HE = frozenset(_words("fisherman, king, prince, boy, grandfather, wizard, rooster, bull, ferryman, knight"))
SHE = frozenset(_words("queen, princess, girl, grandmother, witch, hen, cow, mermaid, fairy"))

# Never used while training: what the model makes of a subject it has not seen.
HELD_OUT = _words("walrus, otter, juggler, kettle, llama, helicopter, plumber, tractor, willow, sailboat")

_GROUPS = (
    (World.LAND, PEOPLE + ANIMALS + MAGIC),
    (World.SEA, SEA),
    (World.HOUSE, HOUSE),
    (World.STILL, STILL),
    (World.SKY, SKY),
)


def kind_of(noun: str, world: World) -> Kind:
    """The kind with this noun, its gender set where the noun decides it."""
    return Kind(noun, world, "he" if noun in HE else "she" if noun in SHE else "")


KINDS = {world: tuple(kind_of(noun, world) for noun in nouns) for world, nouns in _GROUPS}

BOYS = _words("""Pip, Toby, Oscar, Milo, Finn, Leo, Otto, Hugo, Sam, Ben, Jack, Tom, Max, Felix, Jasper, Theo, Rufus,
Barnaby, Edgar, Omar, Ravi, Kai, Mateo, Emil, Anton, Bruno, Gus, Henry, Ned, Oliver, Percy, Silas, Walter, Wilbur, Arlo,
Basil, Caleb, Dante, Ezra, Farid, Ivan, Jonas, Luka, Noah, Pablo, Quinn, Ronan, Simon, Tariq, Yusuf, Bo, Ollie, Rusty""")
GIRLS = _words("""Mia, Lily, Rosa, Clara, Nora, Ella, Ivy, Luna, Daisy, Hazel, Ruby, Poppy, Olive, Maya, Zoe, Anna, Ada,
Bella, Cora, Dora, Elsie, Freya, Greta, Hana, Iris, Juno, Kira, Leila, Mabel, Nina, Opal, Pearl, Ruth, Sofia, Tess, Uma,
Vera, Wren, Yara, Zara, Amina, Beatrice, Flora, Holly, Josie, Lucy, Matilda, Penny, Stella, Tilly, Willa, Alma, Edith""")

KIND_ADJECTIVES = _words("""brave, shy, little, old, young, clever, kind, lonely, curious, proud, gentle, lazy, cheerful,
quiet, tiny, small, big, grumpy, silly, sleepy, hungry, friendly, nervous, careful, patient, clumsy, playful, stubborn,
dreamy, greedy, happy, sad, funny, tired, restless, polite, forgetful, wise, noisy, bold, magical, lost, scared""")

HOMES: dict[World, tuple[Place, ...]] = {
    World.LAND: (
        Place("in", ("deep", "green", "quiet", "dark", "great"), "forest"),
        Place("in", ("small", "quiet", "busy", "snowy", "sleepy"), "village"),
        Place("beside", ("wide", "cold", "slow", "bright"), "river"),
        Place("on", ("windy", "green", "high", "lonely"), "hill"),
        Place("in", ("little", "warm", "crooked", "wooden"), "cottage"),
        Place("near", ("blue", "quiet", "silver", "frozen"), "lake"),
        Place("at the foot of", ("tall", "snowy", "grey", "misty"), "mountain"),
        Place("on", ("small", "faraway", "sunny", "rocky"), "island"),
        Place("in", ("old", "great", "forgotten", "tall"), "castle"),
        Place("in", ("large", "noisy", "bright", "rainy"), "city"),
        Place("on", ("busy", "little", "old", "muddy"), "farm"),
        Place("in", ("sunny", "wide", "grassy", "peaceful"), "meadow"),
        Place("by", ("grey", "wide", "stormy", "calm"), "sea"),
        Place("in", ("hot", "wide", "golden", "silent"), "desert"),
        Place("in", ("hidden", "deep", "narrow", "green"), "valley"),
        Place("in", ("dark", "cool", "secret", "rocky"), "cave"),
        Place("in", ("wild", "pretty", "secret", "walled"), "garden"),
        Place("in", ("thick", "warm", "noisy", "green"), "jungle"),
        Place("near", ("old", "foggy", "busy", "quiet"), "harbor"),
        Place("in", ("little", "faraway", "quiet", "dusty"), "town"),
    ),
    World.SEA: (
        Place("in", ("deep", "blue", "cold", "wide"), "ocean"),
        Place("near", ("bright", "old", "colorful", "quiet"), "reef"),
        Place("in", ("warm", "calm", "quiet", "green"), "bay"),
        Place("in", ("dark", "cool", "hidden", "rocky"), "sea cave"),
        Place("beside", ("sunken", "broken", "lost", "old"), "shipwreck"),
        Place("in", ("blue", "salty", "quiet", "sunny"), "lagoon"),
    ),
    World.HOUSE: (
        Place("in", ("warm", "sunny", "busy", "little"), "kitchen"),
        Place("in", ("dusty", "quiet", "dark", "forgotten"), "attic"),
        Place("in", ("little", "bright", "old", "crowded"), "shop"),
        Place("in", ("tall", "old", "quiet", "crooked"), "house"),
        Place("on", ("high", "dusty", "wooden", "long"), "shelf"),
        Place("in", ("cozy", "small", "cheerful", "messy"), "bedroom"),
        Place("in", ("little", "noisy", "sunny", "old"), "school"),
    ),
    World.STILL: (
        Place("on", ("windy", "green", "high", "lonely"), "hill"),
        Place("at the edge of", ("small", "quiet", "sleepy", "snowy"), "village"),
        Place("beside", ("wide", "cold", "slow", "bright"), "river"),
        Place("in", ("sunny", "wide", "grassy", "peaceful"), "meadow"),
        Place("by", ("grey", "wide", "stormy", "calm"), "sea"),
        Place("in", ("hidden", "deep", "narrow", "green"), "valley"),
        Place("near", ("old", "foggy", "busy", "quiet"), "harbor"),
    ),
    World.SKY: (
        Place("high above", ("small", "quiet", "sleepy", "snowy"), "village"),
        Place("high above", ("deep", "green", "quiet", "dark"), "forest"),
        Place("high above", ("grey", "wide", "stormy", "calm"), "sea"),
        Place("high above", ("large", "noisy", "bright", "rainy"), "city"),
        Place("high above", ("hot", "wide", "golden", "silent"), "desert"),
    ),
}

_LAND_FAR = _words("""the top of the tall hill, the far side of the forest, the old stone bridge, the end of the long
road, the great market, the crystal lake, the edge of the world, the snowy mountain, the hidden waterfall, the northern
sea, the golden city, the silver tower, the valley of flowers, the king's castle, the island of bells""")
_SEA_FAR = _words("""the far side of the reef, the sunken city, the warm bay in the south, the deep blue trench, the
forest of seaweed, the island of pearls, the cave of lights, the great white iceberg, the wreck of the old ship""")
_HOUSE_FAR = _words("""the top of the tall cupboard, the far end of the garden, the attic, the house across the street,
the great market, the window at the top of the stairs, the shop on the corner, the end of the long hall""")
FAR = {
    World.LAND: _LAND_FAR,
    World.SEA: _SEA_FAR,
    World.HOUSE: _HOUSE_FAR,
    World.STILL: _LAND_FAR,
    World.SKY: _LAND_FAR,
}

_LAND_HIDE = _words("""under an old bench, behind the barn, inside a hollow log, beneath a pile of leaves, behind a big
rock, under the bridge, in the tall grass, at the bottom of the well, between two stones, at the top of a tree""")
_SEA_HIDE = _words("""under a flat rock, inside a big shell, behind the coral, in the tall seaweed, beneath the white sand,
between two stones, inside an old barrel""")
_HOUSE_HIDE = _words("""under the sofa, behind the curtain, inside an old boot, beneath a pile of books, at the back of the
drawer, under the stairs, between two cushions, inside the big cupboard""")
HIDE = {
    World.LAND: _LAND_HIDE,
    World.SEA: _SEA_HIDE,
    World.HOUSE: _HOUSE_HIDE,
    World.STILL: _LAND_HIDE,
    World.SKY: _LAND_HIDE,
}

_LAND_OBSTACLES = _words("""wide river, thorny hedge, steep cliff, deep swamp, tall wall, dark tunnel, broken bridge,
fallen tree, field of sharp stones, locked gate""")
_SEA_OBSTACLES = _words("""strong current, dark cave, tangle of seaweed, wall of sharp coral, big fishing net, cloud of black
ink, pile of heavy rocks""")
_HOUSE_OBSTACLES = _words("""tall staircase, closed door, slippery floor, pile of boxes, deep puddle of soup, dark hallway,
high step, messy heap of toys""")
OBSTACLES = {
    World.LAND: _LAND_OBSTACLES,
    World.SEA: _SEA_OBSTACLES,
    World.HOUSE: _HOUSE_OBSTACLES,
    World.STILL: _LAND_OBSTACLES,
    World.SKY: _LAND_OBSTACLES,
}

_LAND_ENEMIES = _words("wolf, monster, troll, tiger, giant, serpent, bear, ogre, crocodile")
ENEMIES = {
    World.LAND: _LAND_ENEMIES,
    World.SEA: _words("shark, sea monster, serpent, giant squid"),
    World.HOUSE: _words("monster, cat, rat, troll, dog"),
    World.STILL: _LAND_ENEMIES,
    World.SKY: _LAND_ENEMIES,
}

OBJECTS = _words("""key, lantern, ball, scarf, bell, button, drum, map, ring, hat, whistle, box, flute, book, cup, coin,
feather, shell, stone, umbrella, kite, mirror, basket, compass, crown, pearl, spoon, necklace, letter, ribbon, blanket,
bottle, seed, boat, clock, sword, cake, pie, candle, painting, teapot, marble, puppet, acorn, violin""")
OBJECT_ADJECTIVES = _words("""red, blue, silver, golden, tiny, old, green, yellow, shiny, wooden, painted, striped, broken,
beautiful, round, strange, white, purple, magic""")
FRIEND_ADJECTIVES = _words(
    "old, young, small, kind, wise, friendly, tired, cheerful, clever, quiet, funny, gentle, tall"
)

_DAILY = _words("""tell jokes, sing old songs, count the stars, hum little tunes, watch the clouds, make new friends,
tell stories, play games, dream about faraway places, listen to the rain, look at the moon""")
HOBBIES = {
    World.LAND: (
        *_DAILY,
        *_words("""dance in the rain, pick berries, bake bread, climb trees, collect pebbles, explore,
        run very fast, draw pictures, plant seeds, read by the fire, walk in the snow, take long naps, build things"""),
    ),
    World.SEA: (*_DAILY, *_words("chase the waves, collect shells, swim in circles, blow bubbles, play with the tide")),
    World.HOUSE: (*_DAILY, *_words("stay warm, look out of the window, help at breakfast, shine in the morning sun")),
    World.STILL: (*_DAILY, *_words("feel the wind, watch the birds, greet every traveler, wait for the sunrise")),
    World.SKY: (*_DAILY, *_words("look down at the rooftops, race the birds, paint the evening sky, play with kites")),
}

SEASONS = _words("spring, summer, autumn, winter")
WEATHER = _words("rainy, sunny, windy, foggy, cold, warm, bright, cloudy, quiet, frosty, golden")
TIMES = _words("morning, afternoon, evening, day")

SYLLABLE_ONSETS = _words("b, bl, d, dr, f, fl, g, gl, gr, k, l, m, n, p, pl, qu, r, s, sn, t, tr, v, w, wh, z")
SYLLABLE_RIMES = _words(
    "ab, ack, ib, ick, oof, ump, een, ort, azz, imp, olly, obber, arn, ule, izzle, onk, eep, ugg, ando, irl"
)
