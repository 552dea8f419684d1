"""The packaged captioner: its pictures and dialogs, its files, and answers that mean something."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer

from benchmarks.captioner.evaluate import REQUIRED, UNSEEN_SEED, ask, count_right, to_data_uri, unseen
from benchmarks.captioner.pictures import NO_PICTURE, dialog, picture
from benchmarks.captioner.tokenizer import CHAT_TEMPLATE, encode_dialog
from benchmarks.captioner.train import encode, make_batch, make_processor, package
from jpaged.checkpoints.hub import find_folder, read_config
from jpaged.checkpoints.weights import load_params, load_vision
from jpaged.demo import CAPTIONER_FOLDER
from jpaged.device.vision import JaxVisionEncoder
from jpaged.llm import LLM
from jpaged.models.model import Model
from jpaged.types import SamplingParams
from tests.e2e.rig import engine_of, open_llm

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
FLOAT32 = np.dtype(np.float32)
SIZES: dict[str, Any] = {"block_size": 8, "num_blocks": 128, "max_model_len": 128, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(CAPTIONER_FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm("demo-captioner", **SIZES) as llm:
        yield llm


def texts(llm: LLM, chats: list[Any], params: SamplingParams = GREEDY) -> list[str]:
    return [output.outputs[0].text for output in llm.chat(chats, params)]


def test_it_is_found_by_name_and_small() -> None:
    assert find_folder("demo-captioner") == CAPTIONER_FOLDER
    assert sum(path.stat().st_size for path in CAPTIONER_FOLDER.iterdir()) < 2e6
    for path in CAPTIONER_FOLDER.glob("*.json"):
        assert str(CAPTIONER_FOLDER.parent.parent) not in path.read_text()


def test_pictures_are_functions_of_seed_and_number() -> None:
    one, again, other = picture(3, 4), picture(3, 4), picture(4, 4)
    np.testing.assert_array_equal(one.pixels_hwc, again.pixels_hwc)
    assert one.caption == again.caption
    assert one.pixels_hwc.shape != other.pixels_hwc.shape or (one.pixels_hwc != other.pixels_hwc).any()


def test_a_dialog_has_the_tokens_of_the_template(tokenizer: Tokenizer) -> None:
    """What training shows is what a server makes of the same messages."""
    import jinja2

    template = jinja2.Environment().from_string(CHAT_TEMPLATE, {"bos_token": "<s>", "eos_token": "</s>"})
    for number in range(20):
        given = dialog(0, number)
        messages: list[dict[str, Any]] = [{"role": "system", "content": given.system}] if given.system else []
        for turn, (question, answer) in enumerate(given.turns):
            parts = [{"type": "text", "text": question}]
            if turn == 0 and given.picture is not None:
                parts.insert(1 if given.is_picture_last else 0, {"type": "image"})
            messages += [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
        token_ids, is_answer = encode_dialog(tokenizer, given, tokenizer.encode("[IMG]").ids)
        assert token_ids == tokenizer.encode(template.render(messages=messages)).ids
        learned = tokenizer.decode(np.array(token_ids)[is_answer].tolist(), skip_special_tokens=False)
        assert learned == "".join(answer + "</s>" for _, answer in given.turns)


@pytest.mark.long
def test_training_encodes_as_the_server_does(tokenizer: Tokenizer) -> None:
    config = read_config(CAPTIONER_FOLDER)
    assert config.vision is not None
    processor = make_processor(config, tokenizer)
    batch = make_batch(tokenizer, processor, config.vision, 0, 0, 6)
    params = load_vision(config.vision, CAPTIONER_FOLDER, FLOAT32, jax.devices()[0])
    layers = [jax.tree.map(lambda a, i=index: a[i], params["layers"]) for index in range(config.vision.num_layers)]
    rows_bpe, _ = encode({**params, "layers": layers}, batch, config.vision)
    shown = [dialog(0, number).picture for number in range(6)]
    images = [processor.prepare(one.pixels_hwc) for one in shown if one is not None]
    want = iter(JaxVisionEncoder(config.vision, params, processor.max_patches).encode(images))
    for row, one in enumerate(shown):
        if one is not None:
            found = next(want)
            np.testing.assert_allclose(rows_bpe[row, : len(found)], found, atol=1e-4)


@pytest.mark.long
def test_what_training_packages_is_read_back(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = read_config(CAPTIONER_FOLDER)
    assert config.vision is not None
    vision = load_vision(config.vision, CAPTIONER_FOLDER, FLOAT32, jax.devices()[0])
    layers = [jax.tree.map(lambda a, i=index: a[i], vision["layers"]) for index in range(config.vision.num_layers)]
    text = load_params(Model(config, jnp.dtype(jnp.float32)), CAPTIONER_FOLDER, "loop")
    package(tmp_path, {"text": text, "vision": {**vision, "layers": layers}}, tokenizer)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in CAPTIONER_FOLDER.iterdir()}
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (CAPTIONER_FOLDER / path.name).read_bytes(), path.name


def test_it_describes_a_picture(llm: LLM) -> None:
    """A data URI in a chat, a picture of Pillow next to a prompt, and a question without a picture."""
    shown = picture(UNSEEN_SEED, 6)
    assert texts(llm, [ask(shown)]) == [shown.caption]
    prompt = "<s>[INST][IMG]What color are they?[/INST]"
    image = Image.fromarray(shown.pixels_hwc)
    (output,) = llm.generate({"prompt": prompt, "multi_modal_data": {"image": image}}, GREEDY)
    assert output.outputs[0].text == shown.color
    assert texts(llm, [[{"role": "user", "content": "What is in the picture?"}]]) == [NO_PICTURE]


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 16},
        {"enable_prefix_caching": False},
        {"num_scheduler_steps": 1, "overlap": False},
        {"num_blocks": 32, "block_size": 4},
    ],
    ids=str,
)
def test_answers_stay_the_same_however_they_are_served(llm: LLM, options: dict[str, Any]) -> None:
    """In chunks that split images, without and with cached prefixes, and in a pool that preempts."""
    questions = ("What is in the picture?", "How many are there?", "What color are they?", "What shape are they?")
    shown = unseen(6)
    chats = [ask(one, question) for one in shown for question in questions]
    longer = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    want = texts(llm, chats, longer)
    assert len(set(want)) > 10
    with open_llm("demo-captioner", **{**SIZES, **options}) as other:
        for _ in range(2):
            assert texts(other, chats, longer) == want
        if "num_blocks" in options:
            assert engine_of(other).load().num_preemptions > 0


@pytest.mark.long
def test_a_dialog_about_one_picture(llm: LLM) -> None:
    """Follow-up questions find the picture in the prefix cache."""
    shown = unseen(8)
    right = 0
    for one in shown:
        messages = ask(one)
        (first,) = llm.chat(messages, GREEDY)
        messages += [
            {"role": "assistant", "content": first.outputs[0].text},
            {"role": "user", "content": "What color are they?"},
        ]
        (second,) = llm.chat(messages, GREEDY)
        assert second.usage.cached_tokens >= 24
        right += second.outputs[0].text == one.color
    assert right >= 7


@pytest.mark.long
def test_it_describes_unseen_pictures(llm: LLM) -> None:
    shown = unseen(200)
    assert count_right(texts(llm, [ask(one) for one in shown]), shown)["all"] >= 200 * REQUIRED


def test_files_are_those_of_transformers() -> None:
    """Keys that transformers' processor of Pixtral reads."""
    given = json.loads((CAPTIONER_FOLDER / "preprocessor_config.json").read_text())
    assert given["image_processor_type"] == "PixtralImageProcessor" and given["size"] == {"longest_edge": 64}
    assert to_data_uri(picture(0, 0)).startswith("data:image/png;base64,iVBOR")
