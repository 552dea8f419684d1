"""A GGUF file's tokenizer has the tokens of the one that it was made of, or of llama.cpp's way to make them."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from jpaged.build import find_source
from jpaged.chat import ChatOptions, Tool
from jpaged.checkpoints.conversion import ConversionOptions, convert_folder
from jpaged.checkpoints.gguf.tokenizer import GgufTokenizer, _merge_order, _pairs, read_tokenizer
from jpaged.config import ModelOptions
from jpaged.demo import FOLDER
from jpaged.errors import InvalidArgument, JpagedError, Unsupported
from jpaged.kernels.cpu.library import find_merges
from jpaged.service.tokenizer import load_tokenizer
from jpaged.service.tokenizer_parts import read_parts
from tests.checkpoints.gguf.files import checkpoint, of_kind, write_gguf

MODEL = checkpoint("llama_mha", num_hidden_layers=1)
TEXTS = (
    *(
        "",
        "Once upon a time",
        " leading",
        "trailing ",
        "two  spaces",
        "line\nbreak\t tab\r\n\n x",
        "naïve café 1234567",
    ),
    *("日本語 🙂", "<|endoftext|>", "a<|user|> b", "I'LL say: 'tis <think>12</think>", "e\u0301 \u2581x", "<s>a</s> b"),
)
SPACE = "\u2581"


def demo_metadata() -> dict[str, Any]:
    """The demo's tokenizer as a converter writes it."""
    parts = json.loads((FOLDER / "tokenizer.json").read_text())
    config = json.loads((FOLDER / "tokenizer_config.json").read_text())
    tokens = sorted(parts["model"]["vocab"], key=parts["model"]["vocab"].get)
    special = {token["content"] for token in parts["added_tokens"]}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in parts["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.padding_token_id": 1,
        "tokenizer.chat_template": config["chat_template"],
    }


def sentence_piece(**more: Any) -> dict[str, Any]:
    """A vocabulary of SentencePiece: bytes, letters, and words with scores in no order."""
    words = ["th", "he", "the", f"{SPACE}t", f"{SPACE}th", f"{SPACE}the", "er", "re", "ere", "her", "ther", "on", "nce"]
    words += ["up", f"{SPACE}u", f"{SPACE}up", "Once", "On", "ce", "li", "ne", "line", "in", "  ", "   ", "\n\n"]
    letters = [SPACE, *"OncetherupliakbsmdingLIvyo12345", "é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<|user|>", "<think>"]
    types = [2, 3, 3, *[6] * 256, 3, 4]
    scores = [0.0] * len(tokens)
    for index, word in enumerate(dict.fromkeys((*words, *letters))):
        tokens.append(word)
        types.append(4 if not word.strip() else 1)
        scores.append(-1000.0 if not word.strip() else -float(index * 7 % 31) - index / 64)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


def read(folder: Path, metadata: dict[str, Any]) -> GgufTokenizer:
    write_gguf(MODEL, folder / "tiny.gguf", of_kind("F32"), more=metadata)
    found = read_tokenizer(folder / "tiny.gguf")
    assert found is not None
    return found


def ids(tokenizer: Any, text: str, *, add_special_tokens: bool = True) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)


def test_merges_are_found_as_python_finds_them() -> None:
    """Among tokens of several bytes a character, duplicates, empty ones and long runs."""
    words = ["", "a", "b", "ab", "ba", "aab", "abab", "é", "éa", "aé", "éaé", "日", "日本", "本", "🙂", "🙂日"]
    words += ["a" * n for n in range(2, 40)] + ["ab", "é"]
    order = _merge_order([3, *[1] * (len(words) - 2), 4], [float(n * 7 % 5) for n in range(len(words))])
    found = find_merges(words, order)
    assert found is not None
    assert found.tolist() == [list(pair) for pair in _pairs(words, order, {word: n for n, word in enumerate(words)})]
    assert len(found) > len(words)


def test_byte_level_tokens_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    found = read(tmp_path, demo_metadata())
    want = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    for text in TEXTS:
        assert ids(found.fast, text) == ids(want, text)
        for skip in (True, False):
            tokens = ids(want, text)
            assert found.fast.decode(tokens, skip_special_tokens=skip) == want.decode(tokens, skip_special_tokens=skip)
    assert (found.vocab_size, found.eos_token_id) == (want.get_vocab_size(), 0)
    assert found.special_tokens == {"eos_token": "<|endoftext|>", "pad_token": "<|pad|>"}


@pytest.mark.long
def test_a_served_file_speaks_as_the_folder_that_it_was_made_of(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(MODEL, file, of_kind("F32"), more=demo_metadata())
    got = find_source(ModelOptions(model=str(file))).tokenizer
    want = load_tokenizer(FOLDER, vocab_size=1)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me <|pad|> more"}]
    assert got.has_chat_template
    assert got.apply_chat_template(messages, max_bytes=1000) == want.apply_chat_template(messages, max_bytes=1000)
    assert (got.eos_token_ids, got.vocab_size) == (want.eos_token_ids, want.vocab_size)


def test_a_file_has_a_template_for_tools(tmp_path: Path) -> None:
    more = {"tokenizer.chat_template": "{{ 'plain' }}", "tokenizer.chat_template.tool_use": "{{ tools[0].type }}"}
    write_gguf(MODEL, tmp_path / "tiny.gguf", of_kind("F32"), more={**demo_metadata(), **more})
    convert_folder(tmp_path / "tiny.gguf", tmp_path / "folder", ConversionOptions("safetensors"))
    for path in (tmp_path / "tiny.gguf", tmp_path / "folder"):
        tokenizer: Any = find_source(ModelOptions(model=str(path))).tokenizer
        for tools, want in (((), "plain"), ((Tool("f"),), "function")):
            options = ChatOptions(tools=list(tools))
            said = tokenizer.chat_ids([{"role": "user", "content": "Hi."}], options, max_bytes=100)
            assert tokenizer.decode(said) == want


@pytest.mark.parametrize("metadata", [demo_metadata(), sentence_piece()], ids=["gpt2", "llama"])
def test_a_converted_file_keeps_its_tokenizer(metadata: dict[str, Any], tmp_path: Path) -> None:
    want = read(tmp_path, metadata)
    convert_folder(tmp_path / "tiny.gguf", tmp_path / "folder", ConversionOptions("safetensors"))
    parts = read_parts(tmp_path / "folder")
    assert [ids(parts.fast, text) for text in TEXTS] == [ids(want.fast, text) for text in TEXTS]
    assert (parts.eos_token_id, parts.chat_template) == (want.eos_token_id, want.chat_template)
    assert parts.special_tokens.items() >= want.special_tokens.items()


def test_a_file_without_a_tokenizer_takes_ids_alone(tmp_path: Path) -> None:
    write_gguf(MODEL, tmp_path / "tiny.gguf", of_kind("F32"))
    assert read_tokenizer(tmp_path / "tiny.gguf") is None
    assert find_source(ModelOptions(model=str(tmp_path / "tiny.gguf"))).tokenizer.vocab_size == 131


def merged(text: str, metadata: dict[str, Any]) -> list[int]:
    """SentencePiece's BPE as llama.cpp has it: the neighbours with the highest score become one."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    vocab = {token: index for index, token in enumerate(tokens)}
    symbols = list(text)
    while True:
        joined = [(scores[vocab[a + b]], -i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in vocab]
        if not joined:
            break
        at = -max(joined)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    found = []
    for symbol in symbols:
        found += [vocab[symbol]] if symbol in vocab else [vocab[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return found


@pytest.mark.parametrize("text", ["Once upon the line", "there the other", "naïve 日本", "1234 thethe", "x"])
def test_sentence_piece_merges_by_score(text: str, tmp_path: Path) -> None:
    metadata = sentence_piece()
    found = read(tmp_path, metadata)
    escaped = SPACE + text.replace(" ", SPACE)
    assert ids(found.fast, text) == [1, *merged(escaped, metadata)]
    assert found.fast.decode(ids(found.fast, text)) == text


@pytest.mark.parametrize("text", ["Once upon the line", "there the other", "naïve 日本", "1234  thethe\n\nx"])
def test_gemma4_merges_as_listed(text: str, tmp_path: Path) -> None:
    listed = ["t h", "h e", f"{SPACE} th", "th e", f"{SPACE}th e", "e r", "O n", "c e", "On ce", "l i", "n e", "li ne"]
    metadata = sentence_piece(model="gemma4", merges=listed, add_space_prefix=False, scores=None)
    tokens, ranks = (
        metadata["tokenizer.ggml.tokens"],
        {tuple(line.split(" ")): rank for rank, line in enumerate(listed)},
    )
    want = [1]
    for part in re.split("(  |\n\n)", text):
        symbols = [part] if part in ("  ", "\n\n") else list(part.replace(" ", SPACE))
        while found := [(ranks[pair], i) for i, pair in enumerate(itertools.pairwise(symbols)) if pair in ranks]:
            _, at = min(found)
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        for symbol in symbols:
            is_known = symbol in tokens
            want += [tokens.index(symbol)] if is_known else [tokens.index(f"<0x{b:02X}>") for b in symbol.encode()]
    fast = read(tmp_path, metadata).fast
    assert ids(fast, text) == want
    assert fast.decode(want) == text


def test_a_tokenizer_without_a_token_for_unknown_text_is_refused(tmp_path: Path) -> None:
    types = [3, *sentence_piece()["tokenizer.ggml.token_type"][1:]]
    more = {"model": "gemma4", "merges": ["t h"], "token_type": types, "unknown_token_id": None}
    with pytest.raises(InvalidArgument, match="unknown_token_id is missing"):
        read(tmp_path, sentence_piece(**more))


@pytest.mark.parametrize("has_prefix", [True, False])
@pytest.mark.parametrize(
    "text", ["the" + " " * 40 + "on", " " * 33, "  \u2581\u2581 the\u2581on", "\u2581\u2581\u2581", "a   b    c"]
)
def test_runs_of_spaces_are_cut_as_llama_cpp_cuts_them(text: str, has_prefix: bool, tmp_path: Path) -> None:
    """Tokens of users are found in the text first, the longest first; a literal U+2581 is none of their spaces."""
    metadata = sentence_piece(add_space_prefix=has_prefix, add_bos_token=False)
    tokens = metadata["tokenizer.ggml.tokens"]
    want: list[int] = []
    for part in re.split("(   |  )", text):
        if part in ("   ", "  "):
            want.append(tokens.index(part))
        elif part:
            want += merged(SPACE * has_prefix + part.replace(" ", SPACE), metadata)
    assert ids(read(tmp_path, metadata).fast, text) == want


def test_tokens_are_found_whole_and_ends_are_added_as_the_file_says(tmp_path: Path) -> None:
    metadata = sentence_piece(add_bos_token=False, add_eos_token=True, add_space_prefix=False)
    fast = read(tmp_path, metadata).fast
    tokens = metadata["tokenizer.ggml.tokens"]
    user, think, two, breaks = (tokens.index(token) for token in ("<|user|>", "<think>", "  ", "\n\n"))
    assert ids(fast, "the<|user|>the") == [tokens.index("the"), user, tokens.index("the"), 2]
    assert ids(fast, "<think>  \n\n", add_special_tokens=False) == [think, two, breaks]
    assert fast.decode([user, think, two, breaks]) == "<think>  \n\n"
    assert fast.decode([tokens.index(f"{SPACE}the")]) == " the"


def test_phi3_takes_the_spaces_behind_its_tokens_along(tmp_path: Path) -> None:
    write_gguf(checkpoint("phi3"), tmp_path / "tiny.gguf", of_kind("F32"), more=sentence_piece())
    found = read_tokenizer(tmp_path / "tiny.gguf")
    assert found is not None
    with_space, without = (ids(found.fast, f"<|user|>{space}the") for space in ("\n", ""))
    assert with_space == without


# What the tokenizers of models cut a text into, by the expressions in their own files.
PUBLISHED = {
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt-4o": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "seed-coder": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}
PUBLISHED |= dict.fromkeys(("megrez", "kormo"), PUBLISHED["qwen2"])
# Files that llama.cpp cuts as another kind's.
SAME = {"mellum": "gpt-2", "a.x-4.0": "gpt-2", "minerva-7b": "starcoder"}


@pytest.mark.parametrize("pre", PUBLISHED)
def test_words_are_cut_as_the_model_was_trained_with(pre: str, tmp_path: Path) -> None:
    found = read(tmp_path, demo_metadata() | {"tokenizer.ggml.pre": pre}).fast
    split = pre_tokenizers.Split(Regex(PUBLISHED[pre]), "isolated")
    plain = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    for text in TEXTS:
        assert found.pre_tokenizer.pre_tokenize_str(text) == plain.pre_tokenize_str(text)
    assert found.normalizer is None
    assert found.model.ignore_merges == (pre in ("llama-bpe", "tekken"))


@pytest.mark.parametrize("pre", SAME)
def test_words_are_cut_as_those_of_another_kind(pre: str, tmp_path: Path) -> None:
    found, same = (read(tmp_path, demo_metadata() | {"tokenizer.ggml.pre": each}).fast for each in (pre, SAME[pre]))
    assert found.to_str() == same.to_str()


@pytest.mark.parametrize("pre", ["olmo", "mpt", "qwen2", "qwen35"])
def test_characters_are_not_composed(pre: str, tmp_path: Path) -> None:
    """As in llama.cpp, whatever the library does that a model was trained with."""
    fast = read(tmp_path, demo_metadata() | {"tokenizer.ggml.pre": pre}).fast
    assert fast.decode(ids(fast, "cafe\u0301")) == "cafe\u0301"
    assert ids(fast, "cafe\u0301") != ids(fast, "caf\u00e9")


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("falcon", "It's $5+3 in 12345", ["It", "'", "s", " ", "$", "5", "+", "3", " in", " ", "123", "45"]),
        (None, "a 12345 `x`", ["a", " ", "123", "45", " `", "x", "`"]),
        (
            "deepseek-llm",
            "Ab \u00e9\u0436 12 x\u4e16\u754c,!\n\n \u10d0",
            ["Ab", " \u00e9\u0436", " ", "12", " x", "\u4e16\u754c", ",!", "\n", "\n", " ", "\u10d0"],
        ),
        ("qwen35", "e\u0301a\u0301 12\n x", ["e\u0301a\u0301", " ", "1", "2", "\n", " x"]),
    ],
)
def test_words_are_cut_as_llama_cpp_cuts_them(
    pre: str | None, text: str, words: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = read(tmp_path, demo_metadata() | {"tokenizer.ggml.pre": pre}).fast
    pieces = found.pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in pieces] == words
    assert [record.levelname for record in caplog.records] == ["WARNING"] * (pre is None)


def test_spaces_that_gpt_neox_has_added_are_found_whole(tmp_path: Path) -> None:
    metadata = demo_metadata() | {"tokenizer.ggml.pre": "olmo"}
    spaces = ["    ", "  "]
    first = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += spaces
    metadata["tokenizer.ggml.token_type"] += [4, 4]
    got = read(tmp_path, metadata).fast
    want = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    want.add_tokens([AddedToken(token, normalized=True, special=False) for token in spaces])
    text = "def f():\n    return  1"
    assert ids(got, text) == ids(want, text)
    assert {first, first + 1} <= set(ids(got, text))
    assert got.decode(ids(got, text)) == text


def test_llama3_begins_a_text_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    metadata = demo_metadata() | {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.bos_token_id": 4}
    assert ids(read(tmp_path, metadata).fast, "a")[0] == 4
    silent = metadata | {"tokenizer.ggml.add_bos_token": False}
    assert ids(read(tmp_path, silent).fast, "a") == ids(Tokenizer.from_file(str(FOLDER / "tokenizer.json")), "a")


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, Unsupported, "tokenizer.ggml.model is 'bert'; supported: gpt2, llama"),
        ({"tokenizer.ggml.pre": "viking"}, Unsupported, "tokenizer.ggml.pre is 'viking'; supported: gpt-2"),
        ({"tokenizer.ggml.eos_token_id": 5000}, InvalidArgument, "eos_token_id is 5000; there are 3072 tokens"),
        ({"tokenizer.ggml.bos_token_id": 3072}, InvalidArgument, "bos_token_id is 3072; there are 3072 tokens"),
        ({"tokenizer.ggml.merges": None}, InvalidArgument, "tokenizer.ggml.merges is missing; convert the model again"),
        (
            {"tokenizer.ggml.merges": ["ab"]},
            InvalidArgument,
            "merges has 'ab'; each entry must be two tokens that form one",
        ),
        (
            {"tokenizer.ggml.merges": ["\u00e6 \u00e7"]},
            InvalidArgument,
            "merges has '\u00e6 \u00e7'; each entry must be two",
        ),
        (
            {"tokenizer.ggml.merges": ["b q"]},
            InvalidArgument,
            "merges has 'b q'; each entry must be two tokens that form one",
        ),
        ({"tokenizer.ggml.token_type": [1, 1]}, InvalidArgument, "has 2 types for 3072 tokens"),
        ({"tokenizer.ggml.model": "llama"}, InvalidArgument, "scores must have one number for each token"),
    ],
)
def test_a_broken_or_unknown_tokenizer_is_refused(
    more: dict[str, Any], error: type[JpagedError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        read(tmp_path, demo_metadata() | more)


def test_the_same_words_come_of_a_tokenizer_that_was_trained(tmp_path: Path) -> None:
    """Merges that were counted in a text are found again by their scores."""
    words = ("the other there on line upon once under hunter then lions " * 3).split()
    trained = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    from tokenizers.trainers import BpeTrainer

    trained.train_from_iterator(words, BpeTrainer(vocab_size=80, special_tokens=["<unk>", "<s>", "</s>"]))
    tokens = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    metadata = sentence_piece(tokens=tokens, token_type=[2, 3, 3, *[1] * (len(tokens) - 3)])
    metadata["tokenizer.ggml.scores"] = [-float(index) for index in range(len(tokens))]
    found = read(tmp_path, metadata).fast
    for text in (*words, " ".join(words), "ther lin"):
        assert ids(found, text, add_special_tokens=False) == ids(trained, text)
