"""The captioner's tokenizer: byte-level BPE learned from its dialogs, with the tokens and the template of Mistral 3."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.captioner.pictures import CAPTION, COLOR, COUNT, NO_PICTURE, SHAPE, SHAPES, SYSTEM, Dialog, dialog
from benchmarks.demo_model.tokenizer import learn_merges, write_tokenizer

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
IMAGE, BREAK, END = "[IMG]", "[IMG_BREAK]", "[IMG_END]"
SPECIAL_TOKENS = (BOS, EOS, PAD, "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", IMAGE, BREAK, END)
VOCAB_SIZE = 512
MAX_LEN = 512

CHAT_TEMPLATE = (
    "{%- macro parts(content) -%}"
    "{%- if content is string -%}{{ content }}{%- else -%}"
    "{%- for part in content -%}"
    "{%- if part['type'] == 'text' -%}{{ part['text'] }}"
    "{%- elif part['type'] in ('image', 'image_url') -%}{{ '[IMG]' }}"
    "{%- else -%}{{ raise_exception('a part must be text or an image, not ' + part['type']) }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{%- endmacro -%}"
    "{{ bos_token }}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'system' -%}{{ '[SYSTEM_PROMPT]' + parts(message['content']) + '[/SYSTEM_PROMPT]' }}"
    "{%- elif message['role'] == 'user' -%}{{ '[INST]' + parts(message['content']) + '[/INST]' }}"
    "{%- elif message['role'] == 'assistant' -%}{{ parts(message['content']) + eos_token }}"
    "{%- else -%}{{ raise_exception('role must be system, user or assistant, not ' + message['role']) }}"
    "{%- endif -%}"
    "{%- endfor -%}"
)


def train_tokenizer() -> Tokenizer:
    """Learn the merges: every word of the dialogs becomes one token; other text is bytes."""
    questions = (
        question.format(noun)
        for question in (*CAPTION, *COLOR, *COUNT, *SHAPE)
        for noun in (*SHAPES, *(f"{shape}s" for shape in SHAPES), "shapes")
    )
    answers = (answer for number in range(600) for _, answer in dialog(0, number).turns)
    texts = itertools.chain(questions, answers, SYSTEM * 9, [NO_PICTURE] * 9)
    return learn_merges(texts, VOCAB_SIZE, SPECIAL_TOKENS)


def encode_dialog(tokenizer: Tokenizer, given: Dialog, image_tokens: Sequence[int]) -> tuple[list[int], list[bool]]:
    """Return the tokens of a dialog as the template writes it, and which of them the model learns to write.

    Args:
        image_tokens: tokens in place of the picture.
    """
    token_ids: list[int] = []
    is_answer: list[bool] = []
    for text, is_own in _spans(given):
        added = list(image_tokens) if text == IMAGE else tokenizer.encode(text).ids
        token_ids += added
        is_answer += [is_own] * len(added)
    return token_ids, is_answer


def _spans(given: Dialog) -> Iterator[tuple[str, bool]]:
    yield BOS, False
    if given.system:
        yield f"[SYSTEM_PROMPT]{given.system}[/SYSTEM_PROMPT]", False
    for turn, (question, answer) in enumerate(given.turns):
        has_picture = turn == 0 and given.picture is not None
        yield "[INST]", False
        if has_picture and not given.is_picture_last:
            yield IMAGE, False
        yield question, False
        if has_picture and given.is_picture_last:
            yield IMAGE, False
        yield "[/INST]", False
        yield answer + EOS, True


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the captioner's tokenizer."""
    others = [token for token in SPECIAL_TOKENS if token not in (BOS, EOS, PAD)]
    special = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "additional_special_tokens": others}
    write_tokenizer(tokenizer, folder, MAX_LEN, special, CHAT_TEMPLATE)
