"""The captioner's tokenizer: byte-level BPE learned from its dialogs, with the tokens and the template of Mistral 3."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.captioner.pictures import CAPTION, COLOR, COUNT, NO_PICTURE, SHAPE, SHAPES, SYSTEM, Dialog, dialog
from jpaged import json_text

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
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    questions = (
        question.format(noun)
        for question in (*CAPTION, *COLOR, *COUNT, *SHAPE)
        for noun in (*SHAPES, *(f"{shape}s" for shape in SHAPES), "shapes")
    )
    answers = (answer for number in range(600) for _, answer in dialog(0, number).turns)
    tokenizer.train_from_iterator(itertools.chain(questions, answers, SYSTEM * 9, [NO_PICTURE] * 9), trainer)
    return tokenizer


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
    """Write tokenizer.json and tokenizer_config.json, as transformers' AutoTokenizer reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_LEN,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [token for token in SPECIAL_TOKENS if token not in (BOS, EOS, PAD)],
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json_text.dumps(config, indent=2) + "\n", encoding="utf-8")
