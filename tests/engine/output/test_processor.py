"""Characters come whole and once; nothing of a stop string is ever sent."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.config import EngineConfig
from jpaged.engine.engine import Engine
from jpaged.engine.output.processor import IncrementalDetokenizer, OutputState, RememberedTexts, StopStrings
from jpaged.engine.tokenizer import NoTokenizer
from jpaged.testing import ByteTokenizer, FakeExecutor, expected_tokens
from jpaged.types import FinishReason, OutputEvent, Request, SamplingParams

TOKENIZER = ByteTokenizer()


def detokenize(token_ids, prompt=()):
    detokenizer = IncrementalDetokenizer(TOKENIZER, tuple(prompt), skip_special_tokens=True)
    parts = [detokenizer.push(token_id) for token_id in token_ids]
    return [*parts, detokenizer.flush()]


@given(st.text(), st.text())
def test_the_parts_make_the_whole_text(prompt, text):
    parts = detokenize(text.encode(), prompt.encode())
    assert "".join(parts) == text
    assert all("\ufffd" not in part for part in parts) or "\ufffd" in text


@given(st.text(min_size=1))
def test_a_character_comes_as_soon_as_it_is_complete(text):
    parts = detokenize(text.encode())
    at = 0
    for character in text:
        at += len(character.encode())
        if character != "\ufffd":
            assert "".join(parts[:at]).endswith(character)


@given(st.binary(max_size=40))
def test_bytes_that_are_no_text_never_wait_for_more_than_a_character(data):
    pending = 0
    for part in detokenize(data)[:-1]:
        pending = 0 if part else pending + 1
        assert pending <= 4


def run_stops(stops, parts):
    state = StopStrings(tuple(stops))
    sent = ""
    for part in parts:
        new, matched = state.push(part)
        sent += new
        if matched is not None:
            return sent, matched
    return sent + state.flush(), None


@given(
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text(alphabet="abc", max_size=3), max_size=12),
)
def test_stop_strings_cut_where_the_whole_text_would_be_cut(stops, parts):
    sent, matched = run_stops(stops, parts)
    for end in range(len(parts) + 1):
        so_far = "".join(parts[:end])
        hits = [(so_far.find(stop), -len(stop), stop) for stop in stops if stop in so_far]
        if hits:
            assert (sent, matched) == (so_far[: min(hits)[0]], min(hits)[2])
            return
    assert (sent, matched) == ("".join(parts), None)


@given(
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text(alphabet="ab", max_size=3), max_size=12),
)
def test_no_character_of_a_match_was_sent_before_it(stops, parts):
    state = StopStrings(tuple(stops))
    sent = text = ""
    for part in parts:
        text += part
        new, matched = state.push(part)
        sent += new
        assert text.startswith(sent)
        if matched is not None:
            assert text[len(sent) :].startswith(matched)
            return


def test_text_that_cannot_become_a_stop_is_not_held():
    state = StopStrings(("END",))
    assert state.push("The E") == ("The ", None)
    assert state.push("gg") == ("Egg", None)
    assert state.push("EN") == ("", None)
    assert state.push("D and more") == ("", "END")


def outputs(text, **sampling):
    state = OutputState(TOKENIZER, (65,), SamplingParams(**sampling), TOKENIZER.eos_token_ids)
    sent = ""
    for token_id in [*text.encode(), ByteTokenizer.EOS]:
        text, finish = state.push(token_id)
        sent += text
        if finish is not None:
            return sent, finish
    raise AssertionError("never finished")


@pytest.mark.parametrize(
    ("sampling", "sent", "reason", "matched"),
    [
        ({"max_tokens": 99}, "hello stop world", FinishReason.STOP, None),
        ({"max_tokens": 7}, "hello s", FinishReason.LENGTH, None),
        ({"max_tokens": 99, "stop": ("stop",)}, "hello ", FinishReason.STOP, "stop"),
        ({"max_tokens": 9, "stop": ("stop",)}, "hello sto", FinishReason.LENGTH, None),
        ({"max_tokens": 99, "stop": ("worlds",)}, "hello stop world", FinishReason.STOP, None),
        ({"max_tokens": 5, "min_tokens": 5}, "hello", FinishReason.LENGTH, None),
        ({"max_tokens": 99, "min_tokens": 5, "stop": ("o",)}, "hell", FinishReason.STOP, "o"),
        ({"max_tokens": 99, "min_tokens": 11, "stop": ("stop", "ld")}, "hello stop wor", FinishReason.STOP, "ld"),
        ({"max_tokens": 99, "stop_token_ids": (ord("w"),)}, "hello stop ", FinishReason.STOP, ord("w")),
    ],
)
def test_how_a_sequence_ends(sampling, sent, reason, matched):
    text, finish = outputs("hello stop world", **sampling)
    assert (text, finish.reason, finish.matched_stop) == (sent, reason, matched)


def test_half_a_character_at_the_end_is_not_lost():
    state = OutputState(TOKENIZER, (65,), SamplingParams(max_tokens=2), frozenset())
    state.push(0xE2)
    assert state.push(0x82)[0] == "\ufffd"


class Counting(ByteTokenizer):
    """Counts the tokens that it is asked to tell."""

    def __init__(self):
        super().__init__(vocab_size=1000)
        self.num_told = 0

    def decode(self, token_ids, *, skip_special_tokens=True):
        self.num_told += len(token_ids)
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


def test_texts_that_come_again_are_not_asked_for_again(monkeypatch):
    tokenizer = Counting()
    texts = RememberedTexts(tokenizer)
    plain = IncrementalDetokenizer(TOKENIZER, tuple(b"once"), skip_special_tokens=True)
    detokenizer = IncrementalDetokenizer(texts, tuple(b"once"), skip_special_tokens=True)
    sequence = "upön ä time ".encode() * 8
    assert [detokenizer.push(token_id) for token_id in sequence] == [plain.push(token_id) for token_id in sequence]
    for token_id in b"a time ":
        detokenizer.push(token_id)
    num_told = tokenizer.num_told
    for token_id in b"a time a time ":
        detokenizer.push(token_id)
    assert tokenizer.num_told == num_told
    assert texts.decode([ByteTokenizer.EOS]) != texts.decode([ByteTokenizer.EOS], skip_special_tokens=False)
    monkeypatch.setattr("jpaged.engine.output.processor._MAX_REMEMBERED", 5)
    for token_id in range(100):
        assert texts.decode([token_id]) == TOKENIZER.decode([token_id])
        assert sum(map(len, texts._texts.values())) <= 6


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("begin", [b"", b"o", "ł".encode()[:1], b"once"])
def test_what_is_remembered_of_pairs_of_tokens_changes_no_text(monkeypatch, begin, skips):
    """Sequences of bytes, of parts of characters and of tokens without text; a small cache is emptied now and then."""
    monkeypatch.setattr("jpaged.engine.output.processor._MAX_REMEMBERED", 20)
    texts, rng = RememberedTexts(TOKENIZER), random.Random(7)
    parts = [*b"ab", *"ł𝄞".encode(), ByteTokenizer.EOS]
    for _ in range(20):
        plain, remembering = (
            IncrementalDetokenizer(one, tuple(begin), skip_special_tokens=skips) for one in (TOKENIZER, texts)
        )
        plain._transitions = Forgetful()
        for token_id in rng.choices(parts, k=40):
            assert remembering.push(token_id) == plain.push(token_id)
            assert remembering.state("") == plain.state("")
        assert remembering.flush() == plain.flush()
    assert 0 < len(texts.transitions[skips]) <= 20


class Forgetful(dict):
    """Remembers nothing."""

    def __setitem__(self, key, value):
        pass


@pytest.mark.parametrize("token_id", [ByteTokenizer.EOS, 999])
def test_tokens_without_text_cost_the_same_however_many_there_are(token_id):
    tokenizer = Counting()
    detokenizer = IncrementalDetokenizer(tokenizer, tuple(b"once"), skip_special_tokens=True)
    for _ in range(1000):
        assert detokenizer.push(token_id) == ""
    assert tokenizer.num_told < 20 * 1000
    assert "".join(detokenizer.push(byte) for byte in "ł!".encode()) == "ł!"


# --- without text ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize(
    ("sampling", "num_tokens", "matched"),
    [
        ({"max_tokens": 30}, 8, None),  # by the model's own end
        ({"max_tokens": 30, "ignore_eos": True}, 30, None),
        ({"max_tokens": 5}, 5, None),
        ({"max_tokens": 30, "stop_at": 3}, 4, "stop"),
        ({"max_tokens": 30, "n": 2, "temperature": 1.0, "seed": 1, "ignore_eos": True}, 30, None),
    ],
)
def test_tokens_without_text_end_where_they_would_with_it(sampling, num_tokens, matched, is_whole):
    """The one beside it has other tokens that end it, which end nobody else."""
    prompt = [3, 1, 4]
    told = expected_tokens(prompt, 30, vocab_size=97)
    stop = told[sampling["stop_at"]] if "stop_at" in sampling else None
    params = {"temperature": 0.0} | {name: value for name, value in sampling.items() if name != "stop_at"}
    events: list[OutputEvent] = []
    engine = Engine(
        FakeExecutor(vocab_size=97, num_blocks=200),
        NoTokenizer(97),
        EngineConfig(),
        eos_token_ids=frozenset({told[7]}),
    )
    chosen = SamplingParams(**params, stop_token_ids=() if stop is None else (stop,))
    engine.submit(Request("r", tuple(prompt), chosen, is_non_streaming=is_whole), events.append)
    others = SamplingParams(temperature=0.0, max_tokens=40, stop_token_ids=tuple(told[:3]), ignore_eos=True)
    engine.submit(Request("other", (9, 9), others), lambda event: None)
    while engine.step():
        engine.check()
    assert sum(map(len, [event.token_ids for event in events if event.index == 0])) == num_tokens
    finish = next(event.finish for event in events if event.index == 0 and event.finish is not None)
    assert finish.matched_stop == (stop if matched == "stop" else None)
    assert finish.reason is (FinishReason.STOP if num_tokens in (4, 8) else FinishReason.LENGTH)
    assert all(event.text == "" for event in events)
    assert engine._loop._output._ending_ids.any.tolist() == []
    assert len(events) == (sampling.get("n", 1) if is_whole else num_tokens * sampling.get("n", 1))


@pytest.mark.parametrize("text", ["€", "é", "😀", "a😀b", "😀é"])
def test_a_character_that_begins_in_the_prompt_is_completed(text: str) -> None:
    data = ("x" + text + "!").encode()
    for cut in range(len(data)):
        detokenizer = IncrementalDetokenizer(ByteTokenizer(), tuple(data[:cut]), skip_special_tokens=True)
        written = "".join(detokenizer.push(byte) for byte in data[cut:]) + detokenizer.flush()
        begun = data[:cut].decode(errors="ignore")
        assert begun + written == data.decode(), cut


def test_a_character_that_the_prompt_begins_and_nothing_ends_is_the_prompts() -> None:
    detokenizer = IncrementalDetokenizer(ByteTokenizer(), (0xE2, 0x82), skip_special_tokens=True)
    assert "".join(map(detokenizer.push, b"abc")) == "abc"


def test_the_context_begins_with_a_character() -> None:
    class Grouping(ByteTokenizer):
        """Reads bytes together as ByteFallback does: one that is wrong spoils all."""

        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            data = bytes(token_ids)
            try:
                return data.decode()
            except UnicodeDecodeError:
                return "\ufffd" * len(data)

    prompt, answer = "😀é".encode(), "你"
    detokenizer = IncrementalDetokenizer(Grouping(), tuple(prompt), skip_special_tokens=True)
    assert "".join(map(detokenizer.push, answer.encode())) == answer
