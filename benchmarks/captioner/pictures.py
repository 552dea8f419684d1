"""Pictures with one to five shapes of one kind and color, and dialogs about them: functions of a seed and a number."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

COUNTS = ("one", "two", "three", "four", "five")
COLORS = {
    "red": (215, 30, 35),
    "orange": (245, 135, 15),
    "yellow": (240, 220, 30),
    "green": (35, 160, 55),
    "blue": (35, 75, 215),
    "purple": (140, 40, 170),
}
SHAPES = ("circle", "square", "triangle", "star")
NO_PICTURE = "there is no picture"
"""The answer to every question without a picture."""

CAPTION = (
    *("What is in the picture?", "What is in this image?", "What do you see?", "What does the picture show?"),
    *("Describe the picture.", "Describe this image.", "Describe the image in one sentence.", "Caption this picture."),
    *("Write a caption.", "What's in this image?", "What can you see in the image?", "", "Describe it."),
)
COLOR = (
    *("What color are the shapes?", "What color are they?", "Which color is it?", "What is the color?"),
    *("Name the color.", "What color is it?", "Which color do you see?", "What is the color of the {}?"),
    *("What color are the {}?", "Which color are the {}?", "What color is the {}?", "The color?"),
)
COUNT = (
    *("How many shapes are there?", "How many are there?", "How many {} are there?", "Count the shapes."),
    *("Count the {}.", "How many {} do you see?", "How many shapes do you see?", "What is the number of shapes?"),
    *("How many {} are in the picture?", "How many objects are in this image?", "How many?", "Count them."),
)
SHAPE = (
    *("What shape are they?", "What shape is it?", "Which shape is in the picture?", "Name the shape."),
    *("What is the shape?", "Which shape do you see?", "What kind of shape is it?", "What shapes are these?"),
    *("What shapes are in the image?", "Which shapes are there?", "The shape?", "What are these?"),
)
SYSTEM = ("You are a helpful assistant.", "Answer in a few words.", "You describe pictures.")
_LONGEST, _SHORTEST = 128, 48
_STAR = 0.42
"""Inner radius of a star of radius 1."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture and what it shows.

    Attributes:
        pixels_hwc: uint8, RGB.
        centers_n2: row and column of each shape's center, from 0 to 1.
    """

    pixels_hwc: NDArray[np.uint8]
    color: str
    shape: str
    centers_n2: NDArray[np.float64]

    @property
    def count(self) -> int:
        """Number of shapes."""
        return len(self.centers_n2)

    @property
    def noun(self) -> str:
        """The shape's name, in the plural if there are several."""
        return self.shape if self.count == 1 else f"{self.shape}s"

    @property
    def caption(self) -> str:
        """The answer to a question of `CAPTION`."""
        return f"{COUNTS[self.count - 1]} {self.color} {self.noun}"


@dataclass(frozen=True, slots=True)
class Dialog:
    """Questions about a picture, or about none, with their answers.

    Attributes:
        is_picture_last: the picture comes after the first question.
        system: text of the system message; empty without one.
    """

    picture: Picture | None
    turns: tuple[tuple[str, str], ...]
    is_picture_last: bool = False
    system: str = ""


def picture(seed: int, number: int) -> Picture:
    """Return a picture: its longer side has 64 to 128 pixels."""
    rng = np.random.default_rng((seed, number))
    count = int(rng.integers(1, 6))
    color = str(rng.choice(list(COLORS)))
    shape = str(rng.choice(SHAPES))
    longer = int(rng.integers(64, _LONGEST + 1))
    shorter = max(_SHORTEST, round(longer * rng.choice((1.0, 1.0, 0.75))))
    size = (longer, shorter) if rng.random() < 0.5 else (shorter, longer)
    image = _background(rng, size)
    draw = ImageDraw.Draw(image)
    places = _places(rng, count, size)
    for x, y, radius in places:
        fill = tuple(int(v) for v in np.clip(np.array(COLORS[color]) + rng.integers(-14, 15, 3), 0, 255))
        draw.polygon(_outline(rng, shape, x, y, radius), fill=fill)
    smooth = np.asarray(image.resize(size, Image.Resampling.BOX), np.float32)
    noise = rng.standard_normal(smooth.shape, np.float32) * np.float32(rng.uniform(0, 6))
    centers_n2 = np.array([(y / (2 * size[1]), x / (2 * size[0])) for x, y, _ in places])
    return Picture(np.clip(smooth + noise, 0, 255).astype(np.uint8), color, shape, centers_n2)


def _background(rng: np.random.Generator, size: tuple[int, int]) -> Image.Image:
    """Return a canvas of twice the size: dark, gray or bright, with little color, growing brighter to one side."""
    width, height = size
    base = rng.choice((20, 128, 238)) + rng.integers(-16, 17) + rng.integers(-9, 10, 3)
    slope_x, slope_y = rng.uniform(-14, 14, 2)
    ramp_hw = np.linspace(-1, 1, height)[:, None] * slope_y + np.linspace(-1, 1, width) * slope_x
    pixels_hwc = np.clip(base + ramp_hw[:, :, None], 0, 255).astype(np.uint8)
    return Image.fromarray(pixels_hwc).resize((2 * width, 2 * height), Image.Resampling.NEAREST)


def _places(rng: np.random.Generator, count: int, size: tuple[int, int]) -> list[tuple[float, float, float]]:
    """Return center and radius of shapes that touch neither each other nor the edge, on a canvas of twice the size."""
    unit = 2 * max(size) / 64
    while True:
        largest = (20.0, 14.0, 12.0, 11.0, 10.0)[count - 1] * unit
        found: list[tuple[float, float, float]] = []
        for _ in range(60):
            radius = rng.uniform(8 * unit, largest)
            x, y = (rng.uniform(radius + unit, max(radius + unit, 2 * length - radius - unit)) for length in size)
            if all(math.hypot(x - a, y - b) > radius + other + 2 * unit for a, b, other in found):
                found.append((x, y, radius))
            if len(found) == count:
                return found


def _outline(rng: np.random.Generator, shape: str, x: float, y: float, radius: float) -> list[tuple[float, float]]:
    """Return the corners of a shape, turned a little."""
    corners, turn = {"circle": (48, 0.0), "square": (4, 0.2), "triangle": (3, 0.3), "star": (10, 0.3)}[shape]
    start = rng.uniform(-turn, turn) - (math.pi / 4 if shape == "square" else math.pi / 2)
    angles = start + np.arange(corners) * (2 * math.pi / corners)
    radii = np.where(np.arange(corners) % 2, _STAR, 1.0) * radius if shape == "star" else np.full(corners, radius)
    return list(zip(x + radii * np.cos(angles), y + radii * np.sin(angles), strict=True))


def dialog(seed: int, number: int) -> Dialog:
    """Return a picture with several questions, or in one of 24 dialogs a question without a picture."""
    rng = np.random.default_rng((seed, number, 1))
    system = str(rng.choice(SYSTEM)) if rng.random() < 0.15 else ""
    if rng.random() < 1 / 24:
        kind = (CAPTION, COLOR, COUNT, SHAPE)[int(rng.integers(4))]
        noun = f"{rng.choice(SHAPES)}s"
        return Dialog(None, ((_question(rng, kind, noun), NO_PICTURE),), system=system)
    shown = picture(seed, number)
    asked = [
        (CAPTION, shown.caption),
        (COLOR, shown.color),
        (COUNT, COUNTS[shown.count - 1]),
        (SHAPE, shown.shape),
    ]
    order = rng.permutation(4)
    turns = tuple((_question(rng, asked[index][0], shown.noun), asked[index][1]) for index in order)
    return Dialog(shown, turns, bool(rng.random() < 0.3), system)


def _question(rng: np.random.Generator, kind: tuple[str, ...], noun: str) -> str:
    text = str(rng.choice(kind)).format(noun if rng.random() < 0.3 else "shapes")
    style = rng.random()
    if style < 0.1:
        return text.lower()
    return text.rstrip("?.") if style < 0.2 else text


def dialogs(seed: int) -> Iterator[Dialog]:
    """Yield all dialogs of a seed, without end."""
    number = 0
    while True:
        yield dialog(seed, number)
        number += 1
