"""Files of pictures become RGB pixels as transformers reads them; broken and hostile ones are errors that name them."""

from __future__ import annotations

import io
import os
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from jpaged.errors import InvalidArgument
from jpaged.service.images import MAX_PIXELS, PictureDecoder, read_pixels
from tests.service.broken_images import FORMATS, broken, picture, png_bomb

FIELD = "messages[2].content[1].image_url"
GRAY = np.arange(40 * 56, dtype=np.uint16).reshape(40, 56) * 29


@pytest.fixture(scope="module")
def decoder() -> PictureDecoder:
    return PictureDecoder(1)


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    written = io.BytesIO()
    image.save(written, kind, **options)
    return written.getvalue()


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_gives_the_pixels_of_pillow(decoder: PictureDecoder, kind: str) -> None:
    content = picture(kind)
    expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
    np.testing.assert_array_equal(decoder.decode(FIELD, content), expected)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
def test_every_mode_becomes_rgb(decoder: PictureDecoder, mode: str) -> None:
    image = Image.open(io.BytesIO(picture("PNG"))).convert(mode)
    content = saved(image, "JPEG" if mode == "CMYK" else "PNG")
    expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
    np.testing.assert_array_equal(decoder.decode(FIELD, content), expected)


def test_sixteen_bits_keep_the_upper_eight(decoder: PictureDecoder) -> None:
    pixels = decoder.decode(FIELD, saved(Image.fromarray(GRAY)))
    np.testing.assert_array_equal(pixels, np.repeat((GRAY >> 8).astype(np.uint8)[..., None], 3, axis=2))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_turned_as_exif_asks(decoder: PictureDecoder, orientation: int) -> None:
    image = Image.open(io.BytesIO(picture("PNG")))
    exif = image.getexif()
    exif[0x0112] = orientation
    content = saved(image, exif=exif)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB"))
    np.testing.assert_array_equal(decoder.decode(FIELD, content), expected)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_the_first_image_of_an_animation_counts(decoder: PictureDecoder, kind: str) -> None:
    frames = [Image.new("RGB", (16, 8), color) for color in ("red", "lime", "blue")]
    content = saved(frames[0], kind, save_all=True, append_images=frames[1:])
    pixels = decoder.decode(FIELD, content)
    assert pixels.shape == (8, 16, 3)
    assert pixels[0, 0, 0] > 200
    assert pixels[0, 0, 1] < 50


def check_broken(decoder: PictureDecoder, count: int) -> int:
    """Decode broken files; return the number of those that are errors."""
    errors = list[InvalidArgument]()
    for content in broken(count):
        try:
            pixels = decoder.decode(FIELD, content)
        except InvalidArgument as error:
            errors.append(error)
        else:
            assert pixels.size <= 3 * MAX_PIXELS
    assert {error.field for error in errors} == {FIELD}
    assert all(0 < len(error.problem) < 250 for error in errors)
    return len(errors)


def test_broken_files_are_errors_of_bounded_size(decoder: PictureDecoder) -> None:
    assert check_broken(decoder, 34) >= 28
    assert decoder.decode(FIELD, picture("PNG")).shape == (40, 56, 3)


@pytest.mark.long
def test_three_hundred_broken_files_are_errors(decoder: PictureDecoder) -> None:
    assert check_broken(decoder, 300) >= 200
    assert decoder.decode(FIELD, picture("PNG")).shape == (40, 56, 3)


def test_the_size_is_checked_before_pixels_are_decoded(decoder: PictureDecoder) -> None:
    sizes = []

    def check_size(width: int, height: int) -> None:
        sizes.append((width, height))
        raise InvalidArgument(FIELD, "too large for the model")

    with pytest.raises(InvalidArgument, match="too large for the model"):
        decoder.decode(FIELD, png_bomb(8000, 8000), check_size)
    with pytest.raises(InvalidArgument, match="60000 x 60000 pixels, over the limit of 67108864"):
        decoder.decode(FIELD, png_bomb(60_000, 60_000, num_rows=2), check_size)
    assert sizes == [(8000, 8000)]


@pytest.mark.long
def test_an_answer_that_was_not_read_is_not_the_next_picture(
    decoder: PictureDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = saved(Image.new("RGB", (300, 200), "red"))

    def fail(*args: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as full:
        full.setattr(np, "empty", fail)
        with pytest.raises(MemoryError):
            decoder.decode(FIELD, content)
    assert decoder.decode(FIELD, picture("GIF")).shape == (40, 56, 3)


@pytest.mark.long
def test_a_decoder_that_dies_is_started_again(decoder: PictureDecoder) -> None:
    decoder.decode(FIELD, picture("GIF"))
    child = decoder._free.get()
    assert child is not None
    child.process.kill()
    child.process.wait()
    decoder._free.put(child)
    assert decoder.decode(FIELD, picture("GIF")).shape == (40, 56, 3)

    running = decoder._free.get()
    assert running is not None
    decoder._free.put(running)
    process = running.process

    def kill(width: int, height: int) -> None:
        process.kill()
        process.wait()

    with pytest.raises(InvalidArgument, match="cannot be decoded: the picture ended the decoder"):
        decoder.decode(FIELD, picture("GIF"), kill)
    assert decoder.decode(FIELD, picture("GIF")).shape == (40, 56, 3)


def test_arrays_and_images_of_pillow_are_read_as_they_are() -> None:
    image = Image.open(io.BytesIO(picture("PNG")))
    pixels = np.asarray(image)
    colored: tuple[Any, ...] = (image, pixels, pixels.transpose(2, 0, 1), np.dstack([pixels, pixels[..., :1]]))
    for given in colored:
        np.testing.assert_array_equal(read_pixels(FIELD, given), pixels)
    gray: tuple[Any, ...] = (pixels[..., 0], pixels[..., :1], image.convert("RGBA").getchannel(0))
    for given in gray:
        np.testing.assert_array_equal(read_pixels(FIELD, given), np.repeat(pixels[..., :1], 3, axis=2))
    assert not np.shares_memory(read_pixels(FIELD, pixels), pixels)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (np.zeros((4, 4, 3)), "has the type float64; pixels must be uint8"),
        (np.zeros((7, 4, 5), np.uint8), r"has the shape \(7, 4, 5\)"),
        (np.zeros((0, 4, 3), np.uint8), "is a picture of 4 x 0 pixels: at least one is needed"),
        (np.zeros(3, np.uint8), r"has the shape \(3,\)"),
        (object(), "has the type object"),
        (Image.new("1", (1 << 14, (1 << 12) + 1)), "is a picture of 16384 x 4097 pixels, over the limit"),
    ],
)
def test_other_values_are_named(given: Any, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        read_pixels(FIELD, given)


@pytest.mark.long
def test_pictures_are_decoded_with_low_priority(decoder: PictureDecoder) -> None:
    decoder.decode(FIELD, picture("GIF"))
    child = decoder._free.get()
    assert child is not None
    decoder._free.put(child)
    own, niceness = (os.getpriority(os.PRIO_PROCESS, pid) for pid in (0, child.process.pid))
    assert niceness == min(own + 10, 19)
