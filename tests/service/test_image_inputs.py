"""Images are read once each, encoded together, kept for later requests, and placed where their placeholders are."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from jpaged.chat import ChatMessages, GivenImage, read_message
from jpaged.engine.executor import Geometry
from jpaged.errors import InvalidArgument, JpagedError, RequestTooLong, TryLater
from jpaged.service import image_inputs
from jpaged.service.image_inputs import EncoderCache, ImageInputs, TenantThreads
from jpaged.service.image_sources import ImageSources
from jpaged.service.input_processor import InputProcessor
from jpaged.testing import ByteTokenizer, FakeVision, with_embeds
from jpaged.types import PreparedImage, Prompt, Request, SamplingParams

ONE = SamplingParams(max_tokens=4)
MARK = FakeVision.placeholder_id
GEOMETRY = with_embeds()(max_model_len=64, block_size=4).geometry


def letters(text: str) -> np.ndarray:
    """Pixels of a row of patches, each a letter."""
    row = np.array([list(text.encode())], np.uint8)
    return np.repeat(np.kron(row, np.ones((8, 8), np.uint8))[..., None], 3, axis=2)


def make(vision: FakeVision | None = None, geometry: Geometry = GEOMETRY, **options: Any) -> ImageInputs:
    vision = vision or FakeVision()
    return ImageInputs(vision, vision, ImageSources(), geometry, **options)


def given(*images: Any) -> list[GivenImage]:
    return [GivenImage(f"multi_modal_data.image[{i}]", image) for i, image in enumerate(images)]


def read(inputs: ImageInputs, *images: Any) -> list[PreparedImage]:
    return [one.result() for one in inputs.start_reading(given(*images))]


def encode(inputs: ImageInputs, images: Sequence[PreparedImage], tenant: str = "", salt: str = "") -> list[bytes]:
    """The first numbers of the rows of each image."""
    return [bytes(one.result()[:, 0].astype(np.uint8)) for one in inputs.start_encoding(images, tenant, salt)]


def request_of(inputs: ImageInputs, prompt: Prompt, sampling: SamplingParams = ONE) -> Request:
    processor = InputProcessor(ByteTokenizer(), GEOMETRY)
    processor.set_images(inputs)

    def made(prompt: Prompt) -> Request:
        return processor.make_request(request_id="a", sampling=sampling, prompt=prompt)

    prompt, images = processor.parse_images(prompt)
    return inputs.start_now(images, prompt, made)()


def test_rows_stand_where_the_tokens_of_their_images_are() -> None:
    token_ids = [5, MARK, 6, MARK]
    request = request_of(make(), Prompt(token_ids=token_ids, images=given(letters("ab"), letters("c"))))
    assert request.prompt_token_ids == (5, 32, 32, 10, 6, 32, 10)
    assert request.embeds is not None
    assert [(span.start, span.values_te[:, 0].tolist()) for span in request.embeds.spans] == [(1, [97, 98]), (5, [99])]
    assert request.embeds.num_image_tokens == 5
    assert len(request.embeds.block_digests) == 2


def test_blocks_are_known_by_the_images_in_them() -> None:
    def digests(*images: np.ndarray, before: int = 1) -> tuple[bytes, ...]:
        prompt = Prompt(token_ids=[5] * before + [MARK] * len(images), images=given(*images))
        return request_of(make(), prompt).block_digests

    first = digests(letters("abcdefg"))
    assert first == digests(letters("abcdefg"))
    assert len({*first, *digests(letters("abcdefx")), *digests(letters("abcdefg"), before=2)}) == 8
    assert digests(letters("ab"), letters("c")) != digests(letters("ab"), letters("d"))
    assert digests(letters("abc"), before=4)[0] == b""


@pytest.mark.parametrize(
    ("prompt", "sampling", "problem"),
    [
        (Prompt(token_ids=[5], images=given(letters("a"))), ONE, "0 placeholders of images .token 1. in the prompt do"),
        (Prompt(token_ids=[MARK] * 2, images=given(letters("a"))), ONE, "2 placeholders .* do not match 1 images"),
        (Prompt(token_ids=[MARK], images=given(letters("a" * 62))), ONE, "63 prompt tokens and 4 to generate make 67"),
        (Prompt(token_ids=[MARK], images=given(letters("a" * 64))), ONE, "512 x 8 pixels takes 65 tokens, .* over max"),
        (
            Prompt(token_ids=[MARK], images=given(letters("a"))),
            SamplingParams(max_tokens=4, prompt_logprobs=1),
            r"image\[0\]: is not compatible with prompt_logprobs",
        ),
        (
            Prompt(token_ids=[MARK], images=given(letters("a"))),
            SamplingParams(max_tokens=4, truncate_prompt_tokens=3),
            "truncate_prompt_tokens: is not supported with images",
        ),
    ],
)
def test_a_prompt_that_does_not_fit_its_images_is_never_encoded(
    prompt: Prompt, sampling: SamplingParams, problem: str
) -> None:
    vision = FakeVision()
    with pytest.raises(InvalidArgument, match=problem):
        request_of(make(vision), prompt, sampling)
    assert vision.calls == []


def test_images_of_a_request_are_limited_in_number_and_together() -> None:
    inputs = make(max_images=2)
    with pytest.raises(InvalidArgument, match=r"image\[2\]: is image 3 of 3; limit_mm_per_prompt allows 2"):
        read(inputs, *[letters("a")] * 3)
    with pytest.raises(RequestTooLong, match=r"takes 41 tokens, with those before it 82, over max_model_len \(64\)"):
        read(inputs, *[letters("a" * 40)] * 2)


def test_images_that_wait_together_share_a_call_and_equal_ones_are_encoded_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(image_inputs, "MAX_CALL_PATCHES", 64)
    vision = FakeVision()
    inputs = make(vision)
    one, two, three, four = (read(inputs, letters(text))[0] for text in ("ab", "c", "d" * 41, "e" * 22))
    vision.gate.clear()
    first = inputs.start_encoding([one], "", "")
    while inputs._waiting:  # until the encoder has taken it
        threading.Event().wait(0.001)
    rest = inputs.start_encoding([two, one, three], "", "") + inputs.start_encoding([four, two], "x", "")
    vision.gate.set()
    found = [one.result()[0, 0] for one in first + rest]
    assert bytes(np.array(found, np.uint8)) == b"acadec"
    assert vision.calls == [1, 3, 1]  # one of each tenant in turn, up to 64 patches
    assert inputs.load().num_hits == 1
    assert encode(inputs, [two]) == [b"c"]
    assert (inputs.load().num_queries, inputs.load().num_hits, inputs.load().num_encoded) == (7, 2, 5)


def test_tenants_and_salts_share_no_encoded_images() -> None:
    vision, version = FakeVision(), ["0"]
    inputs = make(vision, weight_version=lambda: version[0])
    images = read(inputs, letters("ab"))
    for tenant, salt in (("", ""), ("a", ""), ("a", "s"), ("", ""), ("a", "s")):
        assert encode(inputs, images, tenant, salt) == [b"ab"]
    assert len(vision.calls) == 3
    version[0] = "1"
    assert encode(inputs, images) == [b"ab"]
    assert len(vision.calls) == 4


def test_a_call_of_the_encoder_takes_several_small_images_or_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two calls a device computes steps: the next call starts when the last one has ended."""
    monkeypatch.setattr(image_inputs, "MAX_CALL_PATCHES", 8)
    vision = FakeVision()
    inputs, sizes = make(vision), list[list[int]]()
    works, is_running = vision.encode, threading.Lock()

    def encode_alone(images: Sequence[PreparedImage]) -> list[np.ndarray]:
        assert is_running.acquire(blocking=False)
        try:
            sizes.append([len(image.patches_pe) for image in images])
            return works(images)
        finally:
            is_running.release()

    monkeypatch.setattr(vision, "encode", encode_alone)
    vision.gate.clear()
    images = [
        read(inputs, letters(letter * num))[0] for letter, num in zip("abcdefg", (1, 3, 4, 20, 2, 7, 5), strict=True)
    ]
    for tenant in ("x", "y"):
        done = inputs.start_encoding(images, tenant, "")
    vision.gate.set()
    for one in done:
        one.result()
    assert all(len(each) == 1 or sum(each) <= 8 for each in sizes), sizes
    assert len(sizes) > 6


def test_images_of_several_prompts_share_a_call() -> None:
    vision = FakeVision()
    inputs = make(vision)
    processor = InputProcessor(ByteTokenizer(), GEOMETRY)
    processor.set_images(inputs)

    def start(*images: Any) -> Callable[[], Request]:
        asked = Prompt(token_ids=[MARK] * len(images), images=given(*images))
        return inputs.start_now(
            asked.images, asked, lambda prompt: processor.make_request(request_id="a", sampling=ONE, prompt=prompt)
        )

    started = [start(letters("a")), start(letters("b"), letters("c")), start(letters("a"))]
    found = [one() for one in started]
    assert vision.calls == [3]
    assert [len(one.prompt_token_ids) for one in found] == [2, 4, 2]
    start(letters("left"))  # by an error of a later prompt
    assert encode(inputs, read(inputs, letters("left"))) == [b"left"]


def test_salts_do_not_add_to_the_share_of_a_tenant() -> None:
    vision = FakeVision()
    inputs = make(vision, cache_bytes=10 * 8)  # ten rows of two numbers
    for number in range(12):
        encode(inputs, read(inputs, letters("ab")), "many", f"salt {number}")
    encode(inputs, read(inputs, letters("abc")), "one", "")
    before = len(vision.calls)
    for number in range(12, 24):
        encode(inputs, read(inputs, letters("ab")), "many", f"salt {number}")
    assert len(vision.calls) == before + 12
    assert encode(inputs, read(inputs, letters("abc")), "one", "") == [b"abc"]
    assert len(vision.calls) == before + 12  # still kept


def test_a_tenant_leaves_threads_to_others() -> None:
    threads = TenantThreads(3, 2, "t")
    held, order = threading.Event(), list[str]()

    def wait() -> None:
        assert held.wait(5)

    slow = [threads.submit("a", wait) for _ in range(2)]
    late = [threads.submit("a", lambda: order.append("a")) for _ in range(2)]
    cancelled = threads.submit("a", lambda: order.append("cancelled"))
    assert cancelled.cancel()
    assert threads.submit("b", lambda: 7).result(5) == 7  # also while the first tenant has more to do
    assert order == []
    held.set()
    for one in (*slow, *late):
        one.result(5)
    with pytest.raises(ZeroDivisionError):
        threads.submit("b", lambda: 1 // 0).result(5)
    assert order == ["a", "a"]


def test_tenants_take_turns_at_threads() -> None:
    threads, held, order = TenantThreads(1, 1, "t"), threading.Event(), list[str]()
    first: Any = threads.submit("a", lambda: held.wait(5))
    works: list[Any] = [threads.submit(name, lambda name=name: order.append(name)) for name in "aaabbc"]  # type: ignore[misc]
    held.set()
    for one in (first, *works):
        one.result(5)
    assert "".join(order) == "abcaba"


def test_slow_urls_of_a_tenant_delay_no_picture_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, held = make(), threading.Event()

    def fetch(field: str, url: str) -> bytes:
        assert "slow" not in url or held.wait(5)
        return b"file"

    monkeypatch.setattr(inputs._sources, "read", fetch)
    monkeypatch.setattr(inputs._decoder, "decode", lambda *args: letters("ab"))
    slow = inputs.start_reading(given(*["http://slow/a.png"] * 20), "a")
    for tenant, source in (("a", letters("ab")), ("b", letters("ab")), ("b", "http://quick/a.png")):
        (found,) = inputs.start_reading(given(source), tenant)
        assert len(found.result(5).patches_pe) == 2
    assert not any(one.done() for one in slow)
    held.set()
    assert all(len(one.result(5).patches_pe) == 2 for one in slow)


async def settle(inputs: ImageInputs, num_bytes: int) -> None:
    """Wait until the loop and the threads, which may hold the last arrays of a call, hold at most `num_bytes`."""
    for _ in range(5000):
        if inputs._memory.num_bytes <= num_bytes:
            return
        await asyncio.sleep(0.001)
    raise AssertionError(f"{inputs._memory.num_bytes} bytes are held")


async def test_images_in_flight_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_inputs, "TENANT_BYTES", 40)
    inputs = make(cache_bytes=0)
    first = await complete(inputs, letters("abcde"), tenant="a")  # 40 bytes of rows
    await settle(inputs, 40)
    with pytest.raises(TryLater, match=r"images of this tenant's requests take 40 bytes of host memory, .* of 40") as e:
        await complete(inputs, letters("f"), tenant="a")
    assert e.value.retry_after_s > 0
    other = await complete(inputs, letters("abcdx"), tenant="b")
    await settle(inputs, 80)
    with pytest.raises(TryLater, match=r"images of all requests take 80 bytes .* over the limit of 80"):
        await complete(inputs, letters("f"), tenant="c")
    del first, e
    await settle(inputs, 40)
    await complete(inputs, letters("f"), tenant="c")
    del other
    await settle(inputs, 0)


async def test_a_request_over_the_memory_of_a_tenant_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_inputs, "_NUM_THREADS", 1)  # in order
    (one,) = read(make(), letters("abcd"))
    size = one.patches_pe.nbytes
    monkeypatch.setattr(image_inputs, "TENANT_BYTES", 2 * size)
    inputs = make(cache_bytes=0)
    images = given(*(letters(text) for text in ("abcd", "efgh", "ijkl")))
    for _ in range(2):  # not TryLater at any attempt
        problem = f"take {2 * size} bytes of host memory without this one, over the limit of {2 * size} for a tenant"
        reads = inputs.start_reading(images, "a", is_bounded=True)
        with pytest.raises(RequestTooLong, match=rf"image\[2\]: images of this request {problem}"):
            reads[2].result(5)
        del reads
        await settle(inputs, 0)
    unbounded = inputs.start_reading(images, "a")
    assert [len(read.result(5).patches_pe) for read in unbounded] == [4, 4, 4]
    with pytest.raises(TryLater, match="images of this tenant's requests"):
        inputs.start_reading(images[:1], "a", is_bounded=True)[0].result(5)


async def test_cached_images_take_no_memory_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_inputs, "TENANT_BYTES", 40)
    inputs = make(cache_bytes=80)
    for text in ("abcde", "fghij", "klmno"):  # 40 bytes of rows each, of which the cache keeps two
        await complete(inputs, letters(text), tenant="a")
        await settle(inputs, inputs.load().cached_bytes)
    assert inputs.load().cached_bytes == 80


def test_a_burst_of_images_submits_no_more_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    vision = FakeVision()
    inputs, num_submitted = make(vision), 0
    images = read(inputs, *(letters(chr(97 + i)) for i in range(20)))
    submit = inputs._encoding.submit

    def counted(*args: Any) -> Any:
        nonlocal num_submitted
        num_submitted += 1
        return submit(*args)

    monkeypatch.setattr(inputs._encoding, "submit", counted)
    vision.gate.clear()
    started = [inputs.start_encoding([image], "", "") for image in images]
    vision.gate.set()
    assert [bytes(one.result(5)[:, 0].astype(np.uint8)) for (one,) in started] == [bytes([97 + i]) for i in range(20)]
    assert num_submitted <= 20, "each call takes at least one image"


def test_the_tenant_with_the_most_bytes_gives_way() -> None:
    cache, rows = EncoderCache(100), np.zeros((1, 5), np.float32)
    for key in (b"1", b"2", b"3"):
        cache.add("a", key, rows)
    cache.add("b", b"1", rows)
    assert cache.find("a", b"1") is not None  # now used last
    cache.add("b", b"2", rows)
    cache.add("b", b"3", rows)
    assert cache.num_bytes == 100
    assert [cache.find("a", key) is None for key in (b"1", b"2", b"3")] == [False, True, False]
    assert all(cache.find("b", key) is not None for key in (b"1", b"2", b"3"))
    cache.add("c", b"1", np.zeros(26, np.float32))
    assert cache.find("c", b"1") is None


def test_a_failure_of_the_encoder_reaches_its_requests_only() -> None:
    vision = FakeVision()
    inputs, works = make(vision), vision.encode
    (image,) = read(inputs, letters("ab"))

    def fail(images: Sequence[PreparedImage]) -> list[np.ndarray]:
        raise JpagedError("lost")

    vision.encode = fail  # type: ignore[method-assign]
    with pytest.raises(JpagedError, match="lost"):
        encode(inputs, [image])
    vision.encode = works  # type: ignore[method-assign]
    assert encode(inputs, [image]) == [b"ab"]


async def test_a_request_that_is_cancelled_leaves_others_their_image() -> None:
    vision = FakeVision()
    inputs = make(vision)
    (image,) = read(inputs, letters("ab"))
    vision.gate.clear()

    async def wait() -> Any:
        return await asyncio.gather(*map(asyncio.wrap_future, inputs.start_encoding([image], "", "")))

    gone, stays = asyncio.create_task(wait()), asyncio.create_task(wait())
    await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    vision.gate.set()
    ((rows),) = await stays
    assert rows[:, 0].tolist() == [97, 98]


class Held(FakeVision):
    """Prepares images of two rows of patches only when `released` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()
        self.num_held = 0

    def prepare(self, pixels_hwc: np.ndarray) -> PreparedImage:
        if len(pixels_hwc) > self.patch_size:
            self.num_held += 1
            self.released.wait()
        return super().prepare(pixels_hwc)


HELD = np.concatenate([letters("a")] * 2)


def complete(inputs: ImageInputs, *images: Any, tenant: str = "") -> asyncio.Task[tuple[Request]]:
    processor = InputProcessor(ByteTokenizer(), GEOMETRY)
    processor.set_images(inputs)

    def made(prompt: Prompt) -> tuple[Request]:
        return (processor.make_request(request_id="a", sampling=ONE, prompt=prompt),)

    prompt = Prompt(token_ids=[MARK] * len(images), images=given(*images))
    return asyncio.create_task(inputs.complete(prompt.images, prompt, made, tenant, ""))


async def test_a_request_whose_images_are_read_does_not_wait_for_others() -> None:
    vision = Held()
    inputs = make(vision)
    try:
        first, second = complete(inputs, letters("a")), complete(inputs, *[HELD] * 9)
        (request,) = await asyncio.wait_for(first, 5)
        assert request.prompt_token_ids == (32, 10)
        assert not second.done()
    finally:
        vision.released.set()
    (request,) = await second
    assert request.prompt_token_ids == (32, 10) * 18


async def test_images_of_a_refused_request_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_inputs, "_NUM_THREADS", 1)
    vision = Held()
    inputs = make(vision)
    try:
        with pytest.raises(InvalidArgument, match=r"image\[0\]: is empty"):
            await complete(inputs, "=", *[HELD] * 9)
    finally:
        vision.released.set()
    inputs._readers.submit("", int).result()
    assert vision.num_held <= 1


def test_messages_with_images_are_parts_for_the_template() -> None:
    content = ["a", {"type": "image_pil", "image_pil": letters("b")}, {"type": "text", "text": "c"}]
    read_one = read_message("messages[0]", {"role": "user", "content": content})
    assert [part["type"] for part in read_one["content"]] == ["text", "image", "text"]
    inputs = make()
    request = request_of(inputs, Prompt(messages=[{"role": "user", "content": content}]))
    assert bytes(request.prompt_token_ids) == b"user: a \nc\nassistant: "
    with pytest.raises(InvalidArgument, match="is an image, but the model reads only text"):
        InputProcessor(ByteTokenizer(), GEOMETRY).tokenize(Prompt(messages=ChatMessages([read_one])))
    processor = InputProcessor(ByteTokenizer(), GEOMETRY)
    processor.set_images(inputs)
    with pytest.raises(InvalidArgument, match="is an image: this method takes only text"):
        processor.tokenize(Prompt(messages=ChatMessages([read_one])))
