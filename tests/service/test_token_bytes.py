"""No text has fewer tokens than its bytes allow, whatever the tokenizer; where that is not known, nobody is refused."""

import json
import sys
import unicodedata
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from jpaged.demo import FOLDER
from jpaged.service.tokenizer import _SHRINKING, GENEROUS_BYTES, TokenBytes, max_token_bytes

BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}
MERGES = [("a", "b"), ("ab", "ab"), ("▁", "▁"), ("▁▁", "▁▁")]
VOCAB = {**BYTES, **{token: 256 + i for i, token in enumerate(["a", "b", "▁", "ab", "abab", "▁▁", "▁▁▁▁", "<unk>"])}}
LETTERS = st.text(alphabet=st.sampled_from("ab ▁éAÅ\u212b\ufb01\uff11 |\u0301\u0345\x00\t\U0001d400"), max_size=40)


def bpe(**options):
    tokenizer = Tokenizer(models.BPE(VOCAB, MERGES, **{"byte_fallback": True, **options}))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def spaced():
    tokenizer = bpe()
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.Metaspace()])
    return tokenizer


@cache
def sound():
    """Tokenizers of the kinds that models have."""
    composing = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    composing.normalizer = normalizers.NFC()
    demo = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    known = bpe(byte_fallback=False, unk_token="<unk>")
    return (demo, composing, bpe(), spaced(), known)


@given(st.one_of(st.text(max_size=60), LETTERS), st.integers(0, 4))
def test_a_text_has_at_least_as_many_tokens_as_its_bytes_say(text, which):
    tokenizer = sound()[which]
    num_tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
    assert len(text.encode()) <= num_tokens * max_token_bytes(tokenizer)


def test_the_bound_is_the_longest_token():
    assert [max_token_bytes(tokenizer) for tokenizer in sound()] == [13, 52, 12, 48, 12]


def altered(change):
    tokenizer = bpe()
    tokenizer.normalizer = None
    change(tokenizer)
    return tokenizer


def with_model(model):
    return altered(lambda tokenizer: setattr(tokenizer, "model", model))


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [
        (altered(lambda t: setattr(t, "normalizer", normalizers.Strip())), " " * 4000),
        (altered(lambda t: setattr(t, "normalizer", normalizers.Replace(Regex(" +"), "a"))), " " * 4000),
        (altered(lambda t: setattr(t, "normalizer", normalizers.Replace("ab" * 8, "a"))), "ab" * 400),
        (altered(lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Whitespace())), " " * 4000),
        (altered(lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Split(" ", "removed"))), " " * 4000),
        (altered(lambda t: t.add_tokens([AddedToken("!", lstrip=True, normalized=False)])), " " * 4000 + "!"),
        (bpe(byte_fallback=False), "é" * 400),
        (bpe(byte_fallback=False, unk_token="<unk>", fuse_unk=True), "é" * 400),
        (with_model(models.WordLevel({"<unk>": 0}, unk_token="<unk>")), "é" * 4000),
        (with_model(models.WordPiece({"<unk>": 0}, unk_token="<unk>")), "é" * 4000),
        (with_model(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0)), "é" * 4000),
    ],
)
def test_a_tokenizer_that_loses_text_gets_the_generous_bound(tokenizer, text):
    tight = max(len(token.encode()) for token in tokenizer.get_vocab())
    assert len(text.encode()) > tight * len(tokenizer.encode(text, add_special_tokens=False).ids)
    assert max_token_bytes(tokenizer) == GENEROUS_BYTES


def num_bytes(text):
    return len(text.encode())


@pytest.mark.long
@pytest.mark.parametrize("form", ["NFC", "NFKC", "NFD", "NFKD"])
def test_no_normal_form_shrinks_a_character_more_than_it_says(form):
    """A composed character came of the longest spelling that has its decomposition."""
    characters = [chr(c) for c in range(sys.maxunicode + 1) if not 0xD800 <= c < 0xE000]
    decomposed = {"NFC": "NFD", "NFKC": "NFKD"}.get(form, form)
    longest: dict[str, int] = {}
    worst = 0.0
    for character in characters:
        parts = unicodedata.normalize(decomposed, character)
        worst = max(worst, num_bytes(character) / num_bytes(parts))
        if len(parts) == 1:
            longest[parts] = max(longest.get(parts, 0), num_bytes(character))
    for character in characters if form != decomposed else ():
        parts = unicodedata.normalize("NFD", character)
        spelled = sum(max(longest.get(part, 0), num_bytes(part)) for part in parts)
        worst = max(worst, spelled / num_bytes(unicodedata.normalize(form, character)))
    assert worst <= _SHRINKING[form]


@pytest.mark.long
def test_no_letter_is_shortened_more_than_it_says_by_lower_case():
    characters = [chr(c) for c in range(sys.maxunicode + 1) if not 0xD800 <= c < 0xE000]
    assert max(num_bytes(c) / num_bytes(c.lower()) for c in characters) <= _SHRINKING["Lowercase"]


TEXTS = ["hello world", " a  b\n", "€ é 😀👩‍🚀 你好", "naïve", "<0x41> ▁ x", "1 2  3", "def f(x):\n    return x"]


def _trained(model: Any, pre: Any, decoder: Any, trainer: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre, decoder
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.add_special_tokens(["<s>", "<|end|>"])
    tokenizer.add_tokens(["<tool>", "né"])
    return tokenizer


def _byte_level() -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    return _trained(models.BPE(), pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel(), trainer)


def byte_fallback() -> Tokenizer:
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", *names], show_progress=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer = _trained(
        models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True),
        pre_tokenizers.Metaspace(prepend_scheme="first"),
        decoders.Sequence(steps),
        trainer,
    )
    written = json.loads(tokenizer.to_str())
    for token in written["added_tokens"]:
        token["special"] &= not token["content"].startswith("<0x")
    return Tokenizer.from_str(json.dumps(written))


def _metaspace() -> Tokenizer:
    trainer = trainers.UnigramTrainer(vocab_size=120, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    return _trained(models.Unigram(), pre_tokenizers.Metaspace(), decoders.Metaspace(), trainer)


def _word_pieces() -> Tokenizer:
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"], show_progress=False)
    model = models.WordPiece(unk_token="[UNK]")
    return _trained(model, pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=False), trainer)


def _demo() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.mark.parametrize("make", [_demo, _byte_level, byte_fallback, _metaspace, _word_pieces])
def test_the_bytes_of_every_token_are_those_that_it_adds_to_a_text(make: Any) -> None:
    tokenizer = make()
    tokens = TokenBytes(tokenizer)
    first = next(i for i in (tokenizer.token_to_id(name) for name in ("a", "▁a", "e", "▁e")) if i is not None)
    before = tokenizer.decode([first])
    assert tokens.of(1 << 20) == b""
    for token_id in tokenizer.get_vocab(with_added_tokens=True).values():
        text = tokenizer.decode([first, token_id, first], skip_special_tokens=False)
        data = tokens.of(token_id)
        assert data or tokenizer.id_to_token(token_id) in ("", "##")
        after = tokens.of(first)
        assert (before.encode() + data + after).decode(errors="replace") == text, tokenizer.id_to_token(token_id)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        joined = b"".join(map(tokens.of, ids)).decode(errors="replace")
        shown = tokenizer.decode(ids, skip_special_tokens=False)
        assert joined in (shown, f" {shown}")


@pytest.mark.parametrize("letter", ["€", "é", "😀", "\x00", "\xad", "\u4f60"])
def test_a_part_of_a_character_is_that_part(letter: str) -> None:
    for make in (_byte_level, byte_fallback):
        tokenizer = make()
        ids = tokenizer.encode(f"x{letter}", add_special_tokens=False).ids
        joined = b"".join(map(TokenBytes(tokenizer).of, ids))
        assert joined.removeprefix(b" ") == f"x{letter}".encode()
