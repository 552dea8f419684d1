"""The packaged tokenizer: any text makes the round trip, and transformers reads it with its chat template."""

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from benchmarks.demo_model.stories import lexicon
from benchmarks.demo_model.stories.grammar import document
from benchmarks.demo_model.tokenizer import SPECIAL_TOKENS, VOCAB_SIZE, train_tokenizer
from jpaged.demo import FOLDER

TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@given(st.text())
@pytest.mark.long
def test_any_text_makes_the_round_trip(text):
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    if not any(token in text for token in SPECIAL_TOKENS):
        assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert all(0 <= token_id < VOCAB_SIZE for token_id in ids)


@pytest.mark.parametrize("text", ["żółw 🐢 と亀", "\x00\x01 \t\n", "👩‍👩‍👧‍👦", "naïve café", " a  b "])
def test_hard_texts_make_the_round_trip(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids) == text


def test_special_tokens_are_the_first_ids():
    assert [TOKENIZER.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    assert TOKENIZER.get_vocab_size() == VOCAB_SIZE


def test_training_again_gives_the_same_tokenizer():
    first, second = (train_tokenizer(1, vocab_size=600, num_documents=200) for _ in range(2))
    assert first.to_str() == second.to_str()
    assert first.get_vocab_size() == 600


def test_nouns_are_few_tokens():
    nouns = [kind.noun for kinds in lexicon.KINDS.values() for kind in kinds]
    assert sum(len(TOKENIZER.encode(f" {noun}").ids) for noun in nouns) < 1.3 * len(nouns)


@pytest.mark.long
def test_the_chat_template_writes_what_the_model_was_trained_on():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    spans = next(spans for spans in (document(1, index) for index in range(50)) if len(spans) == 2)
    question, answer = spans[0].text.split("|>")[1].split("<|")[0], spans[1].text.removesuffix("<|endoftext|>")
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert whole == spans[0].text + spans[1].text
    opened = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert opened == spans[0].text
    with_system = [{"role": "system", "content": "You tell stories."}, *messages[:1]]
    text = tokenizer.apply_chat_template(with_system, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>You tell stories." + spans[0].text
    assert tokenizer.eos_token_id == 0
    assert tokenizer.encode(text) == TOKENIZER.encode(text).ids


def test_the_chat_template_refuses_another_role():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    with pytest.raises(jinja2.TemplateError, match="role must be system, user or assistant, not tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)
