"""The demo model's tokenizer: byte-level BPE learnt from the grammar's own stories, with a chat template.

All 256 bytes are tokens, so that any text makes the round trip.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.demo_model.stories import lexicon
from benchmarks.demo_model.stories.grammar import ASSISTANT, END, PAD, SYSTEM, USER, documents
from jpaged import json_text

VOCAB_SIZE = 3072
NUM_DOCUMENTS = 12_000
SPECIAL_TOKENS = (END, PAD, SYSTEM, USER, ASSISTANT)
MAX_LEN = 1024

# One token opens every message; only what the assistant wrote is closed by the end token.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'system' -%}{{ '<|system|>' + message['content'] }}"
    "{%- elif message['role'] == 'user' -%}{{ '<|user|>' + message['content'] }}"
    "{%- elif message['role'] == 'assistant' -%}{{ '<|assistant|>' + message['content'] + '<|endoftext|>' }}"
    "{%- else -%}{{ raise_exception('role must be system, user or assistant, not ' + message['role']) }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)


def train_tokenizer(seed: int, vocab_size: int = VOCAB_SIZE, num_documents: int = NUM_DOCUMENTS) -> Tokenizer:
    """Learn the merges from the first documents of the corpus and from every noun, held-out ones too."""
    texts = ("".join(span.text for span in spans) for spans in itertools.islice(documents(seed), num_documents))
    nouns = (f"a {noun} and the {noun}" for kinds in lexicon.KINDS.values() for noun in (kind.noun for kind in kinds))
    return learn_merges(itertools.chain(map(_without_specials, texts), nouns), vocab_size, SPECIAL_TOKENS, 2)


def learn_merges(
    texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str], min_frequency: int = 0
) -> Tokenizer:
    """Return a byte-level BPE tokenizer of texts, in which all 256 bytes are tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the demo model's tokenizer."""
    special = {"eos_token": END, "pad_token": PAD, "additional_special_tokens": [SYSTEM, USER, ASSISTANT]}
    write_tokenizer(tokenizer, folder, MAX_LEN, special, CHAT_TEMPLATE)


def write_tokenizer(
    tokenizer: Tokenizer,
    folder: Path,
    max_len: int,
    special_tokens: Mapping[str, str | Sequence[str]],
    chat_template: str,
) -> None:
    """Write tokenizer.json and tokenizer_config.json, as transformers' AutoTokenizer reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_len,
        **special_tokens,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "chat_template": chat_template,
    }
    (folder / "tokenizer_config.json").write_text(json_text.dumps(config, indent=2) + "\n", encoding="utf-8")


def _without_specials(text: str) -> str:
    for token in SPECIAL_TOKENS:
        text = text.replace(token, "\n")
    return text
