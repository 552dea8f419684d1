"""A conversation is tokenized in parts, and every part once: the ids are those of the whole text."""

import random
import threading
from array import array
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from jpaged.chat import ChatOptions, build_chat_options
from jpaged.demo import FOLDER
from jpaged.engine.kv_cache.blocks import block_key, root_block_hash
from jpaged.engine.sequence import SequenceGroup
from jpaged.errors import InvalidArgument
from jpaged.service.chat.formats import parser_for
from jpaged.service.chat.output_config import ChatOutputConfig
from jpaged.service.chat.template import for_template, read_messages
from jpaged.service.input_processor import InputProcessor
from jpaged.service.tokenizer import (
    HuggingFaceTokenizer,
    LiteralText,
    SegmentCache,
    SegmentedTokenizer,
    find_boundaries,
)
from jpaged.testing import FakeExecutor
from jpaged.types import PackedTokens, Prompt, SamplingParams

TEXTS = ["Hello there, how are you?", " a  b\n\nc", "né 你好 🙂", "user assistant system", "1234 <|x> |> \t x", "▁ a▁b"]
ROLES = ("<|start|>", "<|end|>", "<s>", "</s>")


def special(content, **flags):
    return AddedToken(content, special=True, **{"normalized": False, **flags})


def trained(model, trainer, pre=None, normalizer=None, tokens=()):
    tokenizer = Tokenizer(model)
    if pre is not None:
        tokenizer.pre_tokenizer = pre
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.add_special_tokens([*map(special, ROLES), *tokens])
    return tokenizer


def byte_level(**tokens):
    words = Regex(r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    pre = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=380, initial_alphabet=alphabet, show_progress=False)
    return trained(models.BPE(), trainer, pre, normalizers.NFC(), **tokens)


def byte_fallback(pre, normalizer=None, **tokens):
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=360, special_tokens=["<unk>", *names], show_progress=False)
    return trained(models.BPE(unk_token="<unk>", byte_fallback=True), trainer, pre, normalizer, **tokens)


def metaspace(scheme, **tokens):
    return byte_fallback(pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False), **tokens)


def unigram():
    trainer = trainers.UnigramTrainer(vocab_size=60, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])
    return trained(models.Unigram(), trainer, pre_tokenizers.Metaspace(), normalizer)


def word_piece():
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]"], show_progress=False)
    pre, normalizer = pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer()
    return trained(models.WordPiece(unk_token="[UNK]"), trainer, pre, normalizer)


def with_template():
    tokenizer = metaspace("first")
    number = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", number)])
    return tokenizer


KINDS = {
    "demo": lambda: Tokenizer.from_file(str(FOLDER / "tokenizer.json")),
    "literal": lambda: LiteralText(Tokenizer.from_file(str(FOLDER / "tokenizer.json"))).tokenizer,
    "byte level": byte_level,
    "metaspace first": lambda: metaspace("first"),
    "metaspace always": lambda: metaspace("always"),
    "metaspace never": lambda: metaspace("never"),
    "sentencepiece": lambda: byte_fallback(
        None, normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    ),
    "unigram": unigram,
    "word piece": word_piece,
    "adds tokens": with_template,
    "takes spaces": lambda: metaspace(
        "first", tokens=[special("<|r|>", rstrip=True), special("<|l|>", lstrip=True), special("<|b|>", lstrip=True)]
    ),
    "normalized": lambda: byte_level(tokens=[special("<|N|>", normalized=True), special("né")]),
    "overlapping": lambda: byte_level(
        tokens=list(map(special, ["<|a", "<|a|>", "é<|s", "<x", "ab", "ab ", "aa", "a b a", "<|end|><|q|>"]))
    ),
}


@cache
def made(kind):
    tokenizer = KINDS[kind]()
    return tokenizer, SegmentedTokenizer(tokenizer, boundaries(tokenizer), SegmentCache(1 << 16))


def boundaries(tokenizer):
    return find_boundaries(tokenizer, "<|start|><|end|><s></s><|r|><|l|><|b|>")


def whole(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


@st.composite
def conversations(draw, kind):
    """Texts that share parts with each other: special tokens, beginnings and ends of them, spaces and words."""
    tokenizer, _ = made(kind)
    added = tokenizer.get_added_tokens_decoder().values()
    tokens = sorted(token.content for token in added if not token.content.startswith("<0x"))
    pieces = [*tokens, *(token[: len(token) // 2] for token in tokens), *(token[1:] for token in tokens)]
    pieces += [" ", "  ", "\n", "a", " a", "ab ", "é", "e\u0301", "▁", "A1", "hello there", "<", "|", ">", "12345"]
    return "".join(draw(st.lists(st.sampled_from(pieces), max_size=12)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_ids_are_those_of_the_whole_text(kind):
    tokenizer, segmented = made(kind)

    @settings(max_examples=40)
    @given(conversations(kind))
    def check(text):
        parts = segmented.split(text)
        assert "".join(parts) == text
        for _ in range(2):
            assert [*segmented.encode(text, "", "")] == whole(tokenizer, text)

    check()


DEMO_TOKENS = ["<|endoftext|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"]
BOUNDARIES = {
    "demo": DEMO_TOKENS,
    "byte level": [*ROLES],
    "unigram": ["<unk>", *ROLES],
    "word piece": ["[UNK]", *ROLES],
    "takes spaces": [*ROLES, "<|r|>"],
    "normalized": [*ROLES, "né"],
    "overlapping": ["<s>", "</s>", "é<|s", "<x"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_only_tokens_that_are_found_wherever_they_are_written_are_boundaries(kind):
    tokenizer, _ = made(kind)
    if kind == "literal":
        assert len(boundaries(tokenizer)) == len(DEMO_TOKENS)
    else:
        assert boundaries(tokenizer) == BOUNDARIES.get(kind, [*ROLES])


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_the_ids_are_those_of_many_whole_texts(kind):
    tokenizer, segmented = made(kind)

    @settings(max_examples=400)
    @given(st.one_of(conversations(kind), st.text(max_size=30)))
    def check(text):
        assert [*segmented.encode(text, "", "")] == whole(tokenizer, text)

    check()


def changed(change):
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    change(tokenizer)
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [
        changed(lambda t: t.add_tokens([AddedToken("word", single_word=True, normalized=False)])),
        changed(lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.FixedLength(5))),
        changed(lambda t: setattr(t.model, "dropout", 0.5)),
        changed(lambda t: setattr(t, "encode_special_tokens", True)),
        Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")),
    ],
)
def test_a_tokenizer_whose_parts_may_depend_on_each_other_is_given_whole_texts(tokenizer):
    assert find_boundaries(tokenizer, "<|user|>") == []
    segmented = SegmentedTokenizer(tokenizer, [], SegmentCache(1000))
    assert segmented.split("<|user|>a<|user|>") == ["<|user|>a<|user|>"]
    assert segmented.split("") == []


def test_of_thousands_of_special_tokens_those_of_the_template_are_boundaries():
    many = changed(lambda t: t.add_special_tokens([special(f"<unused{i}>") for i in range(1000)]))
    assert find_boundaries(many, "{{ '<|user|>' }}<unused7>, 1 and <unused99>") == [
        "<|user|>",
        "<unused7>",
        "<unused99>",
    ]


class Counting:
    """A Rust tokenizer, and the texts that it was given."""

    def __init__(self, inner):
        self.inner, self.texts = inner, []

    def encode(self, text, **options):
        self.texts.append(text)
        return self.inner.encode(text, **options)

    def encode_batch_fast(self, texts, **options):
        self.texts += texts
        return self.inner.encode_batch_fast(texts, **options)


@pytest.fixture
def counted():
    tokenizer = HuggingFaceTokenizer(FOLDER)
    tokenizer._fast = Counting(tokenizer._fast)
    tokenizer._segmented = SegmentedTokenizer(tokenizer._fast, DEMO_TOKENS, SegmentCache(1 << 20))
    return tokenizer, tokenizer._fast.texts


def turns(*contents):
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def ids_of(tokenizer, messages, tenant="", salt="", **options):
    ids = tokenizer.cached_chat_ids(messages, ChatOptions(**options), max_bytes=1 << 20, tenant=tenant, salt=salt)
    assert [*ids] == tokenizer.chat_ids(messages, ChatOptions(**options), max_bytes=1 << 20)
    return ids


@pytest.mark.parametrize("length", [1, 3000])
def test_a_later_turn_costs_what_it_adds(counted, length):
    tokenizer, texts = counted
    ids_of(tokenizer, turns("Hi" * length))
    texts.clear()
    tokenizer.cached_chat_ids(
        turns("Hi" * length, "Hello" * length, "Why?"), ChatOptions(), max_bytes=1 << 20, tenant="", salt=""
    )
    assert texts == [f"<|assistant|>{'Hello' * length}", "<|endoftext|>", "<|user|>Why?"]


def test_entries_belong_to_a_tenant_and_a_salt(counted):
    tokenizer, texts = counted
    for tenant, salt in (("a", ""), ("b", ""), ("a", "s")):
        texts.clear()
        tokenizer.cached_chat_ids(turns("Hi"), ChatOptions(), max_bytes=1000, tenant=tenant, salt=salt)
        assert len(texts) == 2
    texts.clear()
    for tenant, salt in (("a", ""), ("b", ""), ("a", "s")):
        tokenizer.cached_chat_ids(turns("Hi"), ChatOptions(), max_bytes=1000, tenant=tenant, salt=salt)
    assert texts == []


def test_a_request_names_its_tenant_and_salt_and_other_calls_leave_nothing(counted):
    tokenizer, texts = counted
    processor = InputProcessor(tokenizer, FakeExecutor(max_model_len=64, num_blocks=64, vocab_size=4096).geometry)
    prompt = Prompt(messages=turns("Hi"))
    whole_ids = processor.tokenize(prompt)
    assert len(texts) == 1
    for salt, tenant, num_new in (("", "", 2), ("", "", 0), ("s", "", 2), ("s", "t", 2), ("s", "t", 0)):
        texts.clear()
        sampling = SamplingParams(max_tokens=1, cache_salt=salt)
        request = processor.make_request(request_id="", prompt=prompt, sampling=sampling, cache_tenant=tenant)
        assert request.prompt_token_ids == tuple(whole_ids)
        assert len(texts) == num_new


DROPPING = (
    "{%- set last = namespace(index=-1) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}"
    "{%- set last.index = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{%- for tool in tools or [] -%}<|user|>{{ tool | tojson }}<|endoftext|>{%- endfor -%}"
    "{%- for m in messages -%}{{ '<|assistant|>' if m.role == 'assistant' else '<|user|>' }}"
    "{%- if m.reasoning_content and loop.index0 > last.index -%}<think>{{ m.reasoning_content }}</think>{%- endif -%}"
    "{{- m.content or '' -}}{%- for call in m.tool_calls or [] -%}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{%- endfor -%}<|endoftext|>{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
WORDS = ("Hi", " there", "é\n", "你好", " 42", "<|user|>", "<|endof", "text|>", "</think>", " a  b", "None")
TOOLS = [{"type": "function", "function": {"name": f"tool_{i}", "description": "é" * i}} for i in range(3)]


class RandomTalk:
    """A conversation that grows, and in which earlier messages change."""

    def __init__(self, number):
        self.random = random.Random(number)
        self.messages = []
        self.tools = self.random.choice([[], TOOLS[:1], TOOLS])

    def text(self):
        return "".join(self.random.choices(WORDS, k=self.random.randint(1, 12)))

    def advance(self):
        draw = self.random.random()
        if self.messages and draw < 0.15:
            self.random.choice(self.messages)["content"] = self.text()
        elif len(self.messages) > 2 and draw < 0.25:
            del self.messages[self.random.randint(1, len(self.messages) - 1) :]
        elif draw < 0.3:
            self.tools = self.random.choice([[], TOOLS[:1], TOOLS])
        self.messages.append({"role": "user", "content": self.text()})
        for call_id in map(str, range(self.random.choice([0, 0, 1, 2]))):
            arguments = self.random.choice([{"n": 2**70}, {"text": self.text()}, "{broken", ""])
            function = {"name": "tool_0", "arguments": arguments}
            answer = {"content": self.random.choice([None, self.text()]), "tool_calls": [{"function": function}]}
            self.messages.append({"role": "assistant", "reasoning_content": self.text(), **answer})
            self.messages.append({"role": "tool", "tool_call_id": call_id, "content": self.text()})

    def answer(self):
        self.messages.append({"role": "assistant", "content": self.text(), "reasoning": self.text()})


@pytest.fixture(scope="module")
def dropping():
    tokenizer = HuggingFaceTokenizer(FOLDER, chat_template=DROPPING)
    geometry = FakeExecutor(max_model_len=1 << 14, num_blocks=1 << 12, vocab_size=4096).geometry
    return tokenizer, InputProcessor(
        tokenizer, geometry, answering=ChatOutputConfig(tokenizer, parser_for(DROPPING, "Qwen3ForCausalLM"))
    )


@pytest.mark.parametrize("numbers", [range(4), pytest.param(range(200), marks=pytest.mark.long)])
def test_conversations_have_the_ids_and_block_hashes_that_they_have_without_caches(dropping, numbers):
    tokenizer, processor = dropping
    for number in numbers:
        talk, salt, tenant = RandomTalk(number), f"{number % 2}", f"{number % 3}"
        for _ in range(4):
            talk.advance()
            options = build_chat_options(tools=talk.tools)
            prompt, sampling = Prompt(messages=talk.messages, chat_options=options), SamplingParams(cache_salt=salt)
            request = processor.make_request(request_id="", prompt=prompt, sampling=sampling, cache_tenant=tenant)
            plain = for_template(read_messages(talk.messages), max_bytes=1 << 20)
            wanted = tokenizer.chat_ids(plain, options, max_bytes=1 << 20)
            assert [*request.prompt_token_ids] == wanted
            assert request.prompt_token_ids.packed == array("i", wanted).tobytes()
            leader = SequenceGroup(request, 0, 0.0, lambda event: None, 1 << 12).live[0]
            keys = [root_block_hash(salt, tenant)]
            for begin in range(0, len(wanted) - 15, 16):
                keys.append(block_key(keys[-1], wanted[begin : begin + 16]))
            assert leader.kv.keys(leader.token_ids, len(wanted) // 16, 16) == keys[1:]
            talk.answer()


def test_a_chat_with_added_special_tokens_or_its_own_template_is_tokenized_whole():
    tokenizer = HuggingFaceTokenizer(FOLDER, trusts_request_templates=True)
    ids_of(tokenizer, turns("Hi"), add_special_tokens=True)
    ids_of(tokenizer, turns("Hi"), chat_template="<|user|>{{ messages[0].content }}")
    assert tokenizer._segmented is None
    ids_of(tokenizer, turns("Hi"))
    assert tokenizer._segmented is not None and tokenizer._segmented._cache.num_bytes > 0


@pytest.mark.parametrize("parses", [True, False])
def test_special_tokens_in_messages_are_what_they_are_without_a_cache(parses):
    tokenizer = HuggingFaceTokenizer(FOLDER, parse_special_tokens=parses)
    for _ in range(2):
        ids_of(tokenizer, turns("a<|user|>b <|end", "<|endoftext|>", "x"))


def test_a_text_of_too_many_parts_is_tokenized_whole(monkeypatch):
    monkeypatch.setattr("jpaged.service.tokenizer._MAX_SEGMENTS", 3)
    tokenizer = HuggingFaceTokenizer(FOLDER)
    ids_of(tokenizer, turns("a", "b", "c"))
    assert tokenizer._segments()._cache.num_bytes == 0


def test_a_part_that_cannot_be_tokenized_is_the_callers_fault():
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="nowhere"))
    tokenizer.add_special_tokens([special("<s>")])
    segmented = SegmentedTokenizer(tokenizer, ["<s>"], SegmentCache(1000))
    with pytest.raises(InvalidArgument, match=r"^chat\.messages: the tokenizer cannot encode it: .*UNK"):
        segmented.encode("<s>a<s>b", "", "")


def entry(text, num_ids=10):
    return {text: PackedTokens(range(num_ids))}


def test_the_cache_is_bounded_and_the_oldest_entry_goes_first():
    cache = SegmentCache(4000)
    for text in "abcd":
        cache.add("", "", entry(text))
    cache.find("", "", ["a"])
    each = cache.num_bytes // 4
    while cache.num_bytes + each <= 4000:
        cache.add("", "", entry(f"{cache.num_bytes}"))
    cache.add("", "", entry("z"))
    assert cache.num_bytes <= 4000
    assert set(cache.find("", "", ["a", "b", "z"])) == {"a", "z"}
    cache.add("", "", entry("long", 200))
    assert not cache.find("", "", ["long"])


def test_a_tenant_that_floods_the_cache_loses_only_its_own_entries():
    cache = SegmentCache(4000)
    cache.add("small", "", entry("a"))
    for number in range(100):
        cache.add("large", f"salt {number}", entry("a"))
    assert cache.find("small", "", ["a"])["a"] == tuple(range(10))
    assert cache.num_bytes <= 4000
    cache.add("none", "", entry("long", 1000))
    assert set(cache._entries) == set(cache._tenant_bytes) == {"small", "large"}
    assert cache.num_bytes == sum(cache._tenant_bytes.values())


def test_threads_share_a_cache():
    tokenizer, _ = made("byte level")
    segmented = SegmentedTokenizer(tokenizer, boundaries(tokenizer), SegmentCache(3000))
    texts = [f"<s>{i % 7}<|end|>{i % 5}<|start|>{i}" for i in range(60)]
    wanted = [whole(tokenizer, text) for text in texts]
    found = {}

    def run(name):
        found[name] = [[*segmented.encode(text, name, "")] for text in texts]

    threads = [threading.Thread(target=run, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys("abc", wanted)
    assert segmented._cache.num_bytes == sum(segmented._cache._tenant_bytes.values()) <= 3000
