"""Tokens that end a text or begin a turn are found by their names, whatever type a converter gave them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jpaged.checkpoints import hub
from jpaged.checkpoints.gguf.config import hf_config
from jpaged.checkpoints.gguf.file import open_gguf
from jpaged.checkpoints.gguf.tokenizer import CONTROL, USER_DEFINED, GgufVocabulary, read_vocabulary
from tests.checkpoints.gguf.test_tokenizer import demo_metadata, ids, read, sentence_piece

NORMAL = 1
ENDS = (
    *("<|im_end|>", "<end_of_turn>", "<|end|>", "<|end_of_text|>", "<eos>", "<EOT>", "_<EOT>", "<end_of_utterance>"),
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)


def with_tokens(metadata: dict[str, Any], tokens: dict[str, int]) -> dict[str, Any]:
    """A vocabulary with more tokens of some types."""
    more = {"tokens": list(tokens), "token_type": list(tokens.values()), "scores": [-1000.0] * len(tokens)}
    return metadata | {
        key: metadata[key] + values for name, values in more.items() if (key := f"tokenizer.ggml.{name}") in metadata
    }


def vocabulary(folder: Path, metadata: dict[str, Any]) -> GgufVocabulary:
    read(folder, metadata)
    return read_vocabulary(open_gguf(folder / "tiny.gguf"))


@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER_DEFINED])
@pytest.mark.parametrize("token", ENDS)
def test_a_token_that_ends_a_turn_ends_a_text(token: str, kind: int, tmp_path: Path) -> None:
    metadata = with_tokens(demo_metadata(), {token: kind})
    found = vocabulary(tmp_path, metadata)
    assert (found.ends, found.types[-1]) == ((0, len(found.tokens) - 1), CONTROL)
    assert hf_config(open_gguf(tmp_path / "tiny.gguf"))["eos_token_id"] == list(found.ends)


@pytest.mark.parametrize("token", ["<start_of_turn>", "<|im_start|>", "<|start_header_id|>", "<|im_end|>"])
@pytest.mark.parametrize("metadata", [demo_metadata(), sentence_piece(add_space_prefix=False)], ids=["gpt2", "llama"])
def test_a_token_of_turns_is_found_whole(metadata: dict[str, Any], token: str, tmp_path: Path) -> None:
    found = read(tmp_path, with_tokens(metadata, {token: NORMAL}))
    text = ids(found.fast, f"{token}on{token}", add_special_tokens=False)
    assert text[0] == text[-1] == found.vocab_size - 1
    assert found.fast.decode(text) == "on"


@pytest.mark.parametrize(("kind", "ends"), [(CONTROL, (0, 3072)), (USER_DEFINED, (0,)), (NORMAL, (0,))])
def test_a_slash_s_ends_a_text_where_it_is_no_html(kind: int, ends: tuple[int, ...], tmp_path: Path) -> None:
    assert vocabulary(tmp_path, with_tokens(demo_metadata(), {"</s>": kind})).ends == ends


@pytest.mark.parametrize("others", [("<|return|>", "<|call|>"), ("<|calls|>", "<|flush|>")])
def test_the_end_of_one_of_several_messages_ends_no_text(others: tuple[str, str], tmp_path: Path) -> None:
    tokens = dict.fromkeys(("<|end|>", *others), CONTROL)
    found = vocabulary(tmp_path, with_tokens(demo_metadata(), tokens))
    assert found.ends == (0, 3073, 3074)
    assert found.types[3072] == USER_DEFINED
    alone = vocabulary(tmp_path, with_tokens(demo_metadata(), dict.fromkeys(("<|end|>", others[0]), CONTROL)))
    assert alone.ends == (0, 3072, 3073)


def test_sentence_piece_has_the_ids_that_llama_cpp_knows(tmp_path: Path) -> None:
    silent = sentence_piece() | {f"tokenizer.ggml.{role}_token_id": None for role in ("bos", "eos", "unknown")}
    found = vocabulary(tmp_path, silent)
    assert (found.ids, found.ends) == ({"bos": 1, "eos": 2, "unknown": 0}, (2,))
    config = hub.read_config(tmp_path / "tiny.gguf")
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert ids(read(tmp_path, silent).fast, "the") == ids(read(tmp_path, sentence_piece()).fast, "the")


@pytest.mark.parametrize("role", ["padding", "unknown", "eot"])
def test_an_id_of_no_token_is_passed_over_where_no_text_needs_it(role: str, tmp_path: Path) -> None:
    metadata = demo_metadata() | {f"tokenizer.ggml.{role}_token_id": 50257}
    assert role not in vocabulary(tmp_path, metadata).ids
    assert hub.read_config(tmp_path / "tiny.gguf").eos_token_ids == (0,)
