"""What is read without transformers is what transformers reads; whatever it would add to a file is left to it."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from jpaged.demo import FOLDER
from jpaged.errors import InvalidArgument
from jpaged.service import tokenizer_parts
from jpaged.service.tokenizer import load_tokenizer
from jpaged.service.tokenizer_parts import read_parts

TEXTS = (
    *("", "Once upon a time", " leading", "trailing ", "two  spaces", "line\nbreak\t tab", "naïve café", "日本語 🙂"),
    *("<|endoftext|>", "a<|user|> b", "<|user|><|assistant|>", "<|us er|>", "<extra>", "x<extra> y", "<s>", "</s>"),
)
Change = Callable[[dict[str, Any], dict[str, Any], Path], None]
"""Takes the contents of tokenizer.json and of tokenizer_config.json, and the folder."""


def unchanged(tokenizer: dict[str, Any], config: dict[str, Any], folder: Path) -> None:
    """The demo's files."""


def in_config(**values: Any) -> Change:
    """Fields of tokenizer_config.json."""
    return lambda _tokenizer, config, _folder: config.update(values)


def with_file(name: str, content: str) -> Change:
    """Another file in the folder."""

    def change(_tokenizer: dict[str, Any], _config: dict[str, Any], folder: Path) -> None:
        (folder / name).write_text(content)

    return change


def with_added_tokens_decoder(**flags: Any) -> Change:
    """The tokens of tokenizer.json in the config too, all of them with these flags changed."""

    def change(tokenizer: dict[str, Any], config: dict[str, Any], _folder: Path) -> None:
        config["added_tokens_decoder"] = {
            str(token["id"]): {name: value for name, value in {**token, **flags}.items() if name != "id"}
            for token in tokenizer["added_tokens"]
        }

    return change


def at_the_beginning(tokenizer: dict[str, Any], config: dict[str, Any], _folder: Path) -> None:
    """A token before every text, which the config says nothing about."""
    del config["add_bos_token"]
    tokenizer["post_processor"] = BEGINNING


def without_class(_tokenizer: dict[str, Any], config: dict[str, Any], _folder: Path) -> None:
    """No class is named."""
    del config["tokenizer_class"]


BEGINNING = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|system|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<|system|>": {"id": "<|system|>", "ids": [2], "tokens": ["<|system|>"]}},
}
PLAIN: dict[str, Change] = {
    "the demo's": unchanged,
    "the other generic class": in_config(tokenizer_class="TokenizersBackend", backend="tokenizers"),
    "tokens told twice": with_added_tokens_decoder(),
    "a token at the beginning": at_the_beginning,
    "no special tokens named": in_config(eos_token=None, pad_token=None, additional_special_tokens=[]),
    "a template of its own file": with_file("chat_template.jinja", "{{ eos_token }}{{ messages[0]['content'] }}"),
    "spaces to clean up": in_config(clean_up_tokenization_spaces=True, model_input_names=["input_ids"]),
}
NOT_PLAIN: dict[str, Change] = {
    "a class of its own": in_config(tokenizer_class="LlamaTokenizer"),
    "no class": without_class,
    "a token that the file lacks": in_config(bos_token="<extra>"),
    "more tokens that the file lacks": in_config(additional_special_tokens=["<extra>"]),
    "a token of the vocabulary": in_config(unk_token="he"),
    "tokens with other flags": with_added_tokens_decoder(rstrip=True),
    "a beginning and its own template": in_config(add_bos_token=True, bos_token="<|system|>"),
    "tokens split": in_config(split_special_tokens=True),
    "a token by another name": in_config(image_token="<|user|>"),
    "a legacy map": with_file("special_tokens_map.json", '{"bos_token": "<extra>"}'),
    "legacy tokens": with_file("added_tokens.json", '{"<extra>": 3072}'),
}


def make_folder(folder: Path, change: Change) -> Path:
    """The demo's tokenizer, changed."""
    tokenizer, config = (
        json.loads((FOLDER / f"{name}.json").read_text()) for name in ("tokenizer", "tokenizer_config")
    )
    change(tokenizer, config, folder)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_bytes((FOLDER / "config.json").read_bytes())
    return folder


def assert_as_transformers_reads_it(folder: Path) -> None:
    """The same ids for every text, the same text for ids, and the same facts."""
    from transformers import AutoTokenizer

    theirs: Any = AutoTokenizer.from_pretrained(str(folder))
    parts = read_parts(folder)
    for text in TEXTS:
        for adds in (True, False):
            ids = theirs.encode(text, add_special_tokens=adds)
            assert parts.fast.encode(text, add_special_tokens=adds).ids == ids, text
            for skips in (True, False):
                shown = theirs.backend_tokenizer.decode(ids, skip_special_tokens=skips)
                assert parts.fast.decode(ids, skip_special_tokens=skips) == shown
    assert (parts.vocab_size, parts.eos_token_id) == (len(theirs), theirs.eos_token_id)
    assert parts.chat_template == theirs.chat_template
    assert parts.special_tokens == {name: str(token) for name, token in theirs.special_tokens_map.items()}


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_folder_is_read_as_transformers_reads_it_and_without_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path) -> None:
        pytest.fail(f"{folder} was read by transformers")

    folder = make_folder(tmp_path, PLAIN[name])
    monkeypatch.setattr(tokenizer_parts, "_read_by_transformers", refuse)
    assert_as_transformers_reads_it(folder)


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_a_folder_to_which_transformers_adds_something_is_left_to_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path, NOT_PLAIN[name])
    assert_as_transformers_reads_it(folder)
    asked: list[Path] = []
    monkeypatch.setattr(tokenizer_parts, "_read_by_transformers", asked.append)
    read_parts(folder)
    assert asked == [folder]


@pytest.mark.parametrize("model_type", ["qwen2", "mistral", "opt"])
def test_a_model_that_may_have_a_class_of_its_own_is_left_to_transformers(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path, unchanged)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    asked: list[Path] = []
    monkeypatch.setattr(tokenizer_parts, "_read_by_transformers", asked.append)
    read_parts(folder)
    assert asked == [folder]


@pytest.mark.long
def test_a_plain_tokenizer_imports_neither_transformers_nor_torch() -> None:
    program = (
        "import sys; from pathlib import Path; from jpaged.service.tokenizer import load_tokenizer\n"
        f"tokenizer = load_tokenizer(Path({str(FOLDER)!r}), vocab_size=3072)\n"
        "print(tokenizer.encode('Once'), sorted({'transformers', 'torch'} & set(sys.modules)))"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    ids = Tokenizer.from_file(str(FOLDER / "tokenizer.json")).encode("Once").ids
    assert said.stdout.strip() == f"{ids} []"


WITHOUT_TORCH = """
import importlib.util as util, logging, sys
from pathlib import Path
find_spec = util.find_spec
util.find_spec = lambda name, package=None: None if name == "torch" else find_spec(name, package)
from jpaged.service import tokenizer_parts
if sys.argv[2] == "loud":
    tokenizer_parts.keep_quiet_about_torch = lambda: None
print(tokenizer_parts.read_parts(Path(sys.argv[1])).vocab_size)
logging.getLogger("transformers").warning("a warning that counts")
"""


@pytest.mark.long
def test_that_torch_is_not_there_is_not_said_and_other_warnings_are(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, in_config(tokenizer_class="LlamaTokenizer"))
    said = {}
    for mode in ("quiet", "loud"):
        command = [sys.executable, "-c", WITHOUT_TORCH, str(folder), mode]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        assert done.stdout == "3072\n"
        assert "a warning that counts" in done.stderr
        said[mode] = "PyTorch was not found" in done.stderr
    assert said == {"quiet": False, "loud": True}


@pytest.mark.parametrize(("model_type", "plain_name"), [("llama", "tokenizer_config.json"), ("gpt_neox", None)])
def test_files_may_begin_with_a_byte_order_mark(tmp_path: Path, model_type: str, plain_name: str | None) -> None:
    """Read by tokenizers alone, and by transformers."""
    for path in FOLDER.glob("*.json"):
        mark = b"" if path.name == plain_name else b"\xef\xbb\xbf"
        (tmp_path / path.name).write_bytes(mark + path.read_bytes())
    config = json.loads((FOLDER / "config.json").read_text()) | {"model_type": model_type}
    (tmp_path / "config.json").write_text("\ufeff" + json.dumps(config))
    ours, plain = read_parts(tmp_path), read_parts(FOLDER)
    for text in TEXTS:
        assert ours.fast.encode(text).ids == plain.fast.encode(text).ids
    assert ours.chat_template == plain.chat_template


def test_a_folder_with_tokenizer_model_alone_has_a_tokenizer(tmp_path: Path) -> None:
    """As transformers converts it, by a library that jpaged itself requires."""
    import sentencepiece
    from transformers import AutoTokenizer

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert any(name.startswith("sentencepiece") for name in project["dependencies"])
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a story of a pool", "blocks of a pool", "the story of blocks"] * 20),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "config.json").write_text((FOLDER / "config.json").read_text())
    for config in ({}, {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}):
        if config:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        ours, theirs = read_parts(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
        for text in ("a story of blocks", "two  spaces", "naïve 日本語 🙂"):
            assert ours.fast.encode(text).ids == theirs.encode(text)
            assert ours.fast.decode(ours.fast.encode(text).ids) == text
    assert ours.fast.encode("a pool").tokens == ["<s>", "\u2581a", "\u2581pool"]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_a_pointer_of_git_lfs_and_a_dangling_link_are_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text((FOLDER / "config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 17\n")
    with pytest.raises(InvalidArgument, match=rf"{re.escape(name)} is a pointer of Git LFS"):
        load_tokenizer(tmp_path, vocab_size=300)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("../../blobs/0123")
    with pytest.raises(InvalidArgument, match=rf"{re.escape(name)} is a link to a file that is missing"):
        load_tokenizer(tmp_path, vocab_size=300)


def test_a_tokenizer_model_of_another_library_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((FOLDER / "config.json").read_text())
    (tmp_path / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")
    with pytest.raises(
        InvalidArgument, match=r"tokenizer\.model is not a SentencePiece model: add the tokenizer\.json"
    ):
        load_tokenizer(tmp_path, vocab_size=300)


def write_tiktoken(folder: Path) -> dict[bytes, int]:
    """Writes Kimi's files with a vocabulary trained on a few words; returns the numbers of its tokens."""
    numbers = {bytes([byte]): byte for byte in range(256)}
    words = ["hello", " hello", "HELLO", " world", "low", "lower", "\u4e2d\u6587", "abcabc", "'ll", "  ", "12", "..."]
    for word in map(str.encode, words):
        for end in range(2, len(word) + 1):
            numbers.setdefault(word[:end], len(numbers))
        numbers.setdefault(word[-2:], len(numbers))
    lines = (f"{base64.b64encode(token).decode()} {number}\n" for token, number in numbers.items())
    (folder / "tiktoken.model").write_text("".join(lines))
    first = len(numbers)
    added = {first: "[BOS]", first + 1: "[EOS]", first + 2: "<|im_end|>"}
    config = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": {str(i): {"content": content, "special": True} for i, content in added.items()},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "chat_template": "{{ messages[0].content }}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return numbers


def join_by_number(piece: bytes, numbers: dict[bytes, int]) -> list[int]:
    """Joins the pair whose result has the lowest number, the first of these, until none is left."""
    parts = [piece] if piece in numbers else [bytes([byte]) for byte in piece]
    while True:
        pairs = [(numbers[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in numbers]
        if not pairs:
            return [numbers[part] for part in parts]
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def test_a_vocabulary_of_tiktoken_is_read_without_code_of_the_folder(tmp_path: Path) -> None:
    """Pieces are those of Kimi's pattern: Han apart from other letters, endings with their word, three digits."""
    numbers = write_tiktoken(tmp_path)
    pieces = [
        *("hello", " world", " lower", "\u4e2d\u6587", "abcabc", " HELLO", "123", "45", " ..."),
        *(" he'll", "\n\n", "  ", " caf\u00e9", "\U0001f642", "!"),
    ]
    tokenizer = load_tokenizer(tmp_path, vocab_size=1000)
    text = "".join(pieces)
    expected = [number for piece in pieces for number in join_by_number(piece.encode(), numbers)]
    assert tokenizer.encode(text, add_special_tokens=True) == expected
    assert tokenizer.decode(expected) == text
    parts, first = read_parts(tmp_path), len(numbers)
    assert parts.fast.encode("hello<|im_end|>").ids == [*join_by_number(b"hello", numbers), first + 2]
    assert parts.fast.encode(f"<|reserved_token_{first + 255}|>").ids == [first + 255]
    assert (parts.vocab_size, parts.eos_token_id, parts.special_tokens["bos_token"]) == (
        first + 256,
        first + 1,
        "[BOS]",
    )


@pytest.mark.parametrize(
    ("line", "problem"),
    [("IQ==", "line 2 must be"), ("? 1", "line 2 must be"), ("IQ== 7", "must number its tokens from 0")],
)
def test_a_broken_vocabulary_of_tiktoken_is_named(tmp_path: Path, line: str, problem: str) -> None:
    write_tiktoken(tmp_path)
    (tmp_path / "tiktoken.model").write_text(f"IQ== 0\n{line}\n")
    with pytest.raises(InvalidArgument, match=rf"tiktoken\.model.*{problem}"):
        load_tokenizer(tmp_path, vocab_size=300)
