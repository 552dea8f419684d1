"""The demo's tokenizer through transformers, with and without tokens at the start of texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from jpaged.demo import FOLDER
from jpaged.errors import InvalidArgument
from jpaged.evaluation.runner import Texts

SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)


def write_tokenizer(folder: Path, **config: Any) -> Path:
    """Words alone, and `<s>` before each text."""
    inner = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3, "?": 4}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(["<s>", "</s>"])
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder.mkdir(exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def demo() -> Texts:
    return Texts.load(FOLDER)


@pytest.mark.long
def test_the_demos_tokens_and_texts(demo: Texts) -> None:
    text = "Once upon a time, there was a fox."
    token_ids = demo.encode(text)
    assert demo.decode([*token_ids, 0]) == text
    assert (demo.eos_token_id, demo.prefix_token_id) == (0, 0)
    assert demo.get_id("<|assistant|>") == demo.encode("<|assistant|>")[0]
    assert demo.get_id("fox") is None
    assert "/" not in demo.name


@pytest.mark.long
def test_a_conversation_is_laid_out_and_can_be_left_open(demo: Texts) -> None:
    assert demo.of_chat([SYSTEM, USER], {}) == "<|system|>Be brief.<|user|>Hello<|assistant|>"
    assert demo.of_chat([USER], {}, add_generation_prompt=False) == "<|user|>Hello"


def test_a_template_that_refuses_a_system_message_gets_none(tmp_path: Path) -> None:
    texts = Texts.load(write_tokenizer(tmp_path, chat_template=NO_SYSTEM))
    assert texts.of_chat([SYSTEM, USER], {}) == "Hello"
    with pytest.raises(InvalidArgument, match=r"^messages: .*role"):
        Texts.load(FOLDER).of_chat([{"role": "oracle", "content": "Hello"}], {})


def test_special_tokens_begin_a_text_once(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    texts = Texts.load(folder)
    assert texts.encode("a b") == [0, 2, 3]
    assert texts.encode("<s> a") == [0, 2]
    assert texts.encode("a", add_special_tokens=False) == [2]
    assert texts.encode("<s> a", add_special_tokens=True) == [0, 0, 2]
    without = Texts.load(folder, add_bos_token=False)
    assert without.encode("a b") == [2, 3]
    assert without.encode("a b", add_special_tokens=True)[-2:] == [2, 3]


def test_the_prefix_is_what_is_given_or_bos_or_eos(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    assert Texts.load(folder).prefix_token_id == 0
    assert Texts.load(folder, prefix_token_id=3).prefix_token_id == 3
    assert Texts.load(write_tokenizer(tmp_path / "eos", bos_token=None)).prefix_token_id == 1
    neither = Texts.load(write_tokenizer(tmp_path / "neither", bos_token=None, eos_token=None))
    with pytest.raises(InvalidArgument, match=r"^prefix_token_id: "):
        _ = neither.prefix_token_id
    assert neither.encode("a", add_special_tokens=False) == [2]


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("")
    for folder in (tmp_path, tmp_path / "model.gguf"):
        with pytest.raises(InvalidArgument, match=r"^tokenizer: "):
            Texts.load(folder)
