"""How many unseen pictures the captioner describes right: `python -m benchmarks.captioner.evaluate`.

With `--sheet FILE` the first of them are written as one picture, with the answers.
"""

from __future__ import annotations

import argparse
import base64
import io
import itertools
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw

from benchmarks.captioner.pictures import COUNTS, Picture, picture
from jpaged.llm import LLM
from jpaged.types import SamplingParams

UNSEEN_SEED = 7
"""Seed of pictures that no training step sees."""
REQUIRED = 0.95
"""Share of unseen pictures that the packaged captioner must describe right."""
QUESTION = "What is in the picture?"
_TILE, _LINE = (150, 160), 20


def unseen(num_pictures: int, seed: int = UNSEEN_SEED) -> list[Picture]:
    """Return pictures of a seed other than that of the training."""
    return [picture(seed, number) for number in range(num_pictures)]


def to_png(shown: Picture) -> bytes:
    """Return the picture's file."""
    written = io.BytesIO()
    Image.fromarray(shown.pixels_hwc).save(written, "PNG")
    return written.getvalue()


def to_data_uri(shown: Picture) -> str:
    """Return the picture as a data URI of a PNG file."""
    return "data:image/png;base64," + base64.b64encode(to_png(shown)).decode()


def ask(shown: Picture, question: str = QUESTION) -> list[dict[str, object]]:
    """Return a chat with a picture and a question."""
    image = {"type": "image_url", "image_url": {"url": to_data_uri(shown)}}
    return [{"role": "user", "content": [image, {"type": "text", "text": question}]}]


def count_right(answers: Sequence[str], pictures: Sequence[Picture]) -> dict[str, int]:
    """Return the numbers of captions with the right count, color, shape, and all three."""
    right = dict.fromkeys(("count", "color", "shape", "all"), 0)
    for answer, shown in zip(answers, pictures, strict=True):
        words = [*answer.split(), "", "", ""]
        right["count"] += words[0] == COUNTS[shown.count - 1]
        right["color"] += words[1] == shown.color
        right["shape"] += words[2] == shown.noun
        right["all"] += answer == shown.caption
    return right


def write_sheet(file: Path, answers: Sequence[str], pictures: Sequence[Picture]) -> None:
    """Write two rows of five pictures, with the answers below."""
    width, height = _TILE
    sheet = Image.new("RGB", (5 * width, 2 * height), "white")
    draw = ImageDraw.Draw(sheet)
    tiles = itertools.product(range(2), range(5))
    for (row, column), answer, shown in zip(tiles, answers, pictures, strict=False):
        image, left, top = Image.fromarray(shown.pixels_hwc), column * width, row * height
        place = left + (width - image.width) // 2, top + (height - _LINE - image.height) // 2
        sheet.paste(image, place)
        draw.text((left + width // 2, top + height - _LINE), answer, fill="black", anchor="ma")
    sheet.save(file, optimize=True)


def main() -> None:
    """Print the shares of right captions."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.captioner.evaluate", description="How many captions of unseen pictures are right."
    )
    parser.add_argument("--model", default="demo-captioner", help="name or folder of the captioner")
    parser.add_argument("--num-pictures", type=int, default=200, help="number of pictures")
    parser.add_argument("--seed", type=int, default=UNSEEN_SEED, help="of the pictures")
    parser.add_argument("--sheet", type=Path, metavar="FILE", help="PNG file of ten pictures with the answers")
    args = parser.parse_args()
    pictures = unseen(args.num_pictures, args.seed)
    with LLM(args.model, max_num_seqs=32, max_model_len=128, num_blocks=512) as llm:
        outputs = llm.chat([ask(shown) for shown in pictures], SamplingParams(temperature=0.0, max_tokens=12))
    answers = [output.outputs[0].text for output in outputs]
    if args.sheet:
        write_sheet(args.sheet, answers, pictures)
    for name, number in count_right(answers, pictures).items():
        print(f"{name:6}{number / len(pictures):7.1%}")
    for answer, shown in zip(answers, pictures, strict=True):
        if answer != shown.caption:
            print(f"{shown.caption}: {answer!r}")


if __name__ == "__main__":
    main()
