"""What a grammar says of whole texts, and texts that it makes."""

import functools

import numpy as np

from jpaged.demo import FOLDER
from jpaged.service.structured_output.compiler import CompiledGrammar
from jpaged.service.structured_output.vocabulary import Vocabulary, allowed_ids
from jpaged.service.tokenizer import HuggingFaceTokenizer
from jpaged.structured.grammar import GrammarState

EOS = 0
VOCAB_SIZE = 3072


@functools.cache
def packaged_tokenizer() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(FOLDER)


@functools.cache
def packaged_vocabulary() -> Vocabulary:
    return Vocabulary.of(packaged_tokenizer(), VOCAB_SIZE, {EOS})


def accepts(grammar: CompiledGrammar, text: str) -> bool:
    """Whether the whole text is of the grammar, token by token."""
    state = grammar.start()
    return all(state.accept(token_id) for token_id in packaged_tokenizer().encode(text)) and state.is_complete


def allowed(state: GrammarState, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """The tokens that a mask leaves."""
    mask_w = np.zeros((vocab_size + 31) // 32, np.int32)
    state.fill(mask_w)
    return allowed_ids(mask_w).tolist()


def generate(state: GrammarState, rng: np.random.Generator, max_tokens: int) -> list[int]:
    """Choose evenly from each mask until an end-of-sequence token, or so many tokens."""
    token_ids: list[int] = []
    while len(token_ids) < max_tokens:
        token_id = int(rng.choice(allowed(state)))
        if token_id == EOS:
            break
        assert state.accept(token_id)
        token_ids.append(token_id)
    return token_ids
