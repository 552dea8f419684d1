"""Data sets: prompts and output lengths. The same seed gives the same requests.

    random              random token ids; lengths drawn evenly around --random-input-len and --random-output-len
    prefix_repetition   a few random prefixes, each followed by random suffixes, in a random order
    sharegpt            the first two turns of conversations in a ShareGPT file (JSON)
    custom              a line of JSON per request: {"prompt": ..., "output_tokens": ...}, or "prompt_token_ids"
    multi_turn          random conversations: each turn's prompt is the conversation so far and new tokens
    trace               recorded requests: their times, lengths and shared blocks, with random tokens

Names and semantics of the first four are vLLM's. Random prompts are sent as token ids, so that their lengths are exact
for every server. --prompt-format text converts them to texts for servers that accept only these. A model's vocabulary
provides the ids of random prompts, and token counts of texts.

A trace is a file, or a folder of files, in one of these formats. Equal ids of `hash_ids` are blocks of equal tokens:

    Mooncake   {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ...]}
    AIPerf     the same with "session_id" and "delay": later turns of a session add to it, after a delay in ms
    Weka       {"id": ..., "block_size": 64, "requests": [
                   {"t": 0.0, "type": "n", "in": 448, "out": 21, "hash_ids": [0, 1, ...], "api_time": 1.5},
                   {"t": 3.0, "type": "subagent", "requests": [...]}]}
               an agent's session in seconds, as InferenceX replays them; each request has its whole prompt
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from jpaged.errors import InvalidArgument

if TYPE_CHECKING:
    from jpaged.client import Client


class DatasetVocabulary(Protocol):
    """Vocabulary interface for data sets."""

    size: int
    special_ids: frozenset[int]

    def encode(self, text: str) -> Sequence[int]:
        """Return the tokens of a text, without special ones."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens."""


class TokenizerVocabulary:
    """Vocabulary of a `tokenizers` tokenizer.

    Args:
        vocab_size: rows of the embedding: a tokenizer may have ids that the model lacks.
    """

    def __init__(self, tokenizer: Any, vocab_size: int | None) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.size = min(vocab_size or tokenizer.get_vocab_size(), tokenizer.get_vocab_size())

    def encode(self, text: str) -> Sequence[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)


class FolderVocabulary(TokenizerVocabulary):
    """Vocabulary of the `tokenizer.json` in a Hugging Face folder."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise InvalidArgument("--tokenizer", f"folder {folder} has no tokenizer.json")
        from tokenizers import Tokenizer  # a tenth of a second

        super().__init__(Tokenizer.from_file(str(path)), _vocab_size(folder))


class ServerVocabulary:
    """Vocabulary of a jpaged server, over gRPC."""

    def __init__(self, client: Client) -> None:
        info = client.model_info()
        self._client = client
        self.size = info.vocab_size
        self.special_ids = frozenset(info.eos_token_ids)

    def encode(self, text: str) -> Sequence[int]:
        return self._client.tokenize(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._client.detokenize(token_ids, skip_special_tokens=False)


class NumberedVocabulary:
    """Ids below a size, for a server whose tokenizer is not here; supports only random prompts of ids."""

    special_ids: frozenset[int] = frozenset()

    def __init__(self, size: int) -> None:
        self.size = size

    def encode(self, text: str) -> Sequence[int]:
        raise InvalidArgument("--tokenizer", f"is missing: the lengths of texts are counted with it ({len(text)} here)")

    def decode(self, token_ids: Sequence[int]) -> str:
        raise InvalidArgument("--tokenizer", f"is missing: {len(token_ids)} random tokens become a text with it")


def _vocab_size(folder: Path) -> int | None:
    """Return the rows of the embedding: a tokenizer may have ids that the model lacks."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    config = json.loads(path.read_bytes())
    size = config.get("vocab_size") if isinstance(config, dict) else None
    return size if isinstance(size, int) and size > 0 else None


DatasetName = Literal["random", "prefix_repetition", "sharegpt", "custom", "multi_turn", "trace"]
SESSION_DATASETS: tuple[DatasetName, ...] = ("multi_turn", "trace")
"""Data sets whose requests depend on each other, or have times."""
_MAX_LEN = 2**20
_MAX_PROMPTS = 10_000_000
# Limits of the ShareGPT conversations that are used, in tokens, as in vLLM.
_MIN_TURN_LEN = 4
_MAX_SHAREGPT_PROMPT_LEN = 1024
_MAX_SHAREGPT_TOTAL_LEN = 2048
_MAX_DECODES = 10
_MAX_DELAY_S = 86_400
_MAX_SPEEDUP = 1e6
_MAX_TIME = 1e15
"""Maximum of a recorded time, in the unit of its file; some are the time since 1970 in ms."""
_MAX_SUBAGENTS = 32
"""Maximum depth of agents that run others."""
_MAX_SHOWN = 80
_FROM_0 = (*("random_input_len", "random_prefix_len", "prefix_repetition_prefix_len", "multi_turn_prefix_len"),)
_FROM_1 = (
    *("random_output_len", "prefix_repetition_suffix_len", "prefix_repetition_output_len"),
    *("prefix_repetition_num_prefixes", "custom_output_len", "sharegpt_output_len"),
    *("multi_turn_num_turns", "multi_turn_input_len", "multi_turn_output_len"),
    *("trace_block_size", "trace_max_input_len", "trace_max_output_len"),
)
"""Fields by their lowest value."""
_WARM_UP_SEED = 2**40


Prompt = str | tuple[int, ...]
"""A text, or token ids."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One request to send.

    Attributes:
        prompt: a text, or token ids.
        prompt_len: number of prompt tokens; None if only the server knows it.
        output_len: number of tokens to request.
        session: samples with the same one are sent one after another; None for an independent sample.
        turn: position in its session, from 0.
        adds: the prompt is appended to those of the session's earlier turns and their answers.
        start_s: recorded time, from the start of the trace; None if there is none.
        delay_s: time from the end of the session's previous turn; with a recorded time the later of both counts.
        history: prompts and answers before the prompt, oldest first; known when the earlier turns have ended.
    """

    prompt: Prompt
    prompt_len: int | None
    output_len: int
    session: str | None = None
    turn: int = 0
    adds: bool = False
    start_s: float | None = None
    delay_s: float = 0.0
    history: tuple[tuple[Prompt, Prompt], ...] = ()

    @property
    def whole_prompt(self) -> Prompt:
        """Return the prompt with its history."""
        parts = [part for turn in self.history for part in turn]
        if isinstance(self.prompt, str):
            return "".join([*(part for part in parts if isinstance(part, str)), self.prompt])
        return tuple(one for part in (*parts, self.prompt) for one in part if isinstance(one, int))


@dataclass(frozen=True, slots=True)
class DatasetOptions:
    """Data set and sizes; the fields are the flags. Lengths are in tokens."""

    dataset_name: DatasetName = "random"
    dataset_path: Path | None = None
    num_prompts: int = 200
    seed: int = 0
    random_input_len: int = 256
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    random_prefix_len: int = 0
    prefix_repetition_prefix_len: int = 256
    prefix_repetition_suffix_len: int = 64
    prefix_repetition_num_prefixes: int = 10
    prefix_repetition_output_len: int = 64
    sharegpt_output_len: int | None = None
    custom_output_len: int = 256
    multi_turn_num_turns: int = 5
    multi_turn_prefix_len: int = 0
    multi_turn_input_len: int = 128
    multi_turn_output_len: int = 64
    multi_turn_delay: float = 0.0
    trace_block_size: int = 512
    trace_speedup: float = 1.0
    trace_max_input_len: int | None = None
    trace_max_output_len: int | None = None
    prompt_format: Literal["ids", "text"] = "ids"
    no_oversample: bool = False
    disable_shuffle: bool = False

    def __post_init__(self) -> None:
        self._require("num_prompts", 1, _MAX_PROMPTS)
        self._require("seed", 0, 2**63 - 1)
        for name in _FROM_0:
            self._require(name, 0, _MAX_LEN)
        for name in _FROM_1:
            self._require(name, 1, _MAX_LEN)
        self._require("multi_turn_delay", 0, _MAX_DELAY_S)
        if not 0 < self.trace_speedup <= _MAX_SPEEDUP:
            problem = f"{self.trace_speedup} is out of range: must be above 0 and up to {_MAX_SPEEDUP:g}"
            raise InvalidArgument("--trace-speedup", problem)
        if not 0 <= self.random_range_ratio < 1:
            raise InvalidArgument(
                "--random-range-ratio", f"{self.random_range_ratio} is out of range: must be from 0 to below 1"
            )
        needs_path = self.dataset_name in ("sharegpt", "custom", "trace")
        if needs_path and self.dataset_path is None:
            raise InvalidArgument("--dataset-path", f"is missing: the data set {self.dataset_name} is a file")
        if not needs_path and self.dataset_path is not None:
            raise InvalidArgument("--dataset-path", f"goes with a data set in a file; {self.dataset_name} has none")
        if self.dataset_name == "random" and self.random_prefix_len + self._input_bounds()[0] < 1:
            raise InvalidArgument(
                "--random-input-len", f"{self.random_input_len} is too small: a prompt may come out empty"
            )
        if self.dataset_name == "prefix_repetition" and self.num_prompts < self.prefix_repetition_num_prefixes:
            raise InvalidArgument(
                "--num-prompts",
                f"{self.num_prompts} is below the limit of {self.prefix_repetition_num_prefixes}, "
                "one for each of --prefix-repetition-num-prefixes",
            )

    def for_warm_up(self) -> DatasetOptions:
        """Return the same options with another seed, so that warm-up prompts cause no prefix cache hits."""
        return replace(self, seed=(self.seed + _WARM_UP_SEED) % 2**63)

    def _require(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if value is not None and not low <= value <= high:
            flag = f"--{name.replace('_', '-')}"
            raise InvalidArgument(flag, f"{value} is out of range: must be from {low} to {high}")

    def _input_bounds(self) -> tuple[int, int]:
        return _bounds(self.random_input_len, self.random_range_ratio)

    def make(self, vocabulary: DatasetVocabulary) -> list[Sample]:
        """Return `num_prompts` samples of this data set, or the turns of that number of conversations.

        A trace has at most `num_prompts` samples: the first ones.

        Raises:
            InvalidArgument: a file cannot be read, has another format, or has too few samples under `no_oversample`.
        """
        rng = np.random.default_rng(self.seed)
        if self.dataset_name == "random":
            return self._as_asked(list(self._random(vocabulary, rng)), vocabulary)
        if self.dataset_name == "prefix_repetition":
            return self._as_asked(self._prefix_repetition(vocabulary, rng), vocabulary)
        if self.dataset_name == "sharegpt":
            return self._enough(self._sharegpt(vocabulary, rng), rng)
        if self.dataset_name == "multi_turn":
            return self._as_asked(list(self._multi_turn(vocabulary, rng)), vocabulary)
        if self.dataset_name == "trace":
            return self._as_asked(self._trace(vocabulary), vocabulary)
        return self._enough(self._custom(rng), rng)

    def _random(self, vocabulary: DatasetVocabulary, rng: np.random.Generator) -> Iterator[Sample]:
        ids = _ordinary_ids(vocabulary)
        low, high = self._input_bounds()
        output_low, output_high = _bounds(self.random_output_len, self.random_range_ratio)
        input_lens = rng.integers(low, high + 1, self.num_prompts)
        output_lens = rng.integers(max(1, output_low), max(1, output_high) + 1, self.num_prompts)
        prefix = _random_ids(ids, self.random_prefix_len, rng)
        for input_len, output_len in zip(input_lens.tolist(), output_lens.tolist(), strict=True):
            prompt = prefix + _random_ids(ids, input_len, rng)
            yield Sample(prompt, len(prompt), output_len)

    def _prefix_repetition(self, vocabulary: DatasetVocabulary, rng: np.random.Generator) -> list[Sample]:
        ids, count = _ordinary_ids(vocabulary), self.prefix_repetition_num_prefixes
        prefixes = [_random_ids(ids, self.prefix_repetition_prefix_len, rng) for _ in range(count)]
        samples = []
        for number in range(self.num_prompts):
            prompt = prefixes[number * count // self.num_prompts] + _random_ids(
                ids, self.prefix_repetition_suffix_len, rng
            )
            samples.append(Sample(prompt, len(prompt), self.prefix_repetition_output_len))
        if not self.disable_shuffle:
            rng.shuffle(samples)
        return samples

    def _as_asked(self, samples: list[Sample], vocabulary: DatasetVocabulary) -> list[Sample]:
        if self.prompt_format == "ids":
            return samples
        return [_as_text(sample, vocabulary) for sample in samples]

    def _sharegpt(self, vocabulary: DatasetVocabulary, rng: np.random.Generator) -> list[Sample]:
        path = self._path()
        try:
            entries = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise InvalidArgument("--dataset-path", f"{path} cannot be read: {error}") from error
        turns = [pair for entry in entries if (pair := _first_turns(entry))] if isinstance(entries, list) else []
        if not self.disable_shuffle:
            rng.shuffle(turns)
        samples: list[Sample] = []
        for prompt, answer in turns:
            if len(samples) == self.num_prompts:
                break
            prompt_len = len(vocabulary.encode(prompt))
            output_len = self.sharegpt_output_len or len(vocabulary.encode(answer))
            is_short = prompt_len < _MIN_TURN_LEN or (self.sharegpt_output_len is None and output_len < _MIN_TURN_LEN)
            is_long = prompt_len > _MAX_SHAREGPT_PROMPT_LEN or prompt_len + output_len > _MAX_SHAREGPT_TOTAL_LEN
            if not (is_short or is_long):
                samples.append(Sample(prompt, prompt_len, output_len))
        return samples

    def _custom(self, rng: np.random.Generator) -> list[Sample]:
        path = self._path()
        try:
            lines = path.read_text(encoding="utf-8").split("\n")  # other line ends may occur in strings
        except (OSError, ValueError) as error:
            raise InvalidArgument("--dataset-path", f"{path} cannot be read: {error}") from error
        samples = [
            _custom_sample(line, f"{path}: line {number}", self.custom_output_len)
            for number, line in enumerate(lines, start=1)
            if line.strip()
        ]
        if not self.disable_shuffle:
            rng.shuffle(samples)
        return samples[: self.num_prompts]

    def _multi_turn(self, vocabulary: DatasetVocabulary, rng: np.random.Generator) -> Iterator[Sample]:
        ids = _ordinary_ids(vocabulary)
        prefix = _random_ids(ids, self.multi_turn_prefix_len, rng)
        for number in range(self.num_prompts):
            for turn in range(self.multi_turn_num_turns):
                prompt = (() if turn else prefix) + _random_ids(ids, self.multi_turn_input_len, rng)
                delay_s = self.multi_turn_delay if turn else 0.0
                yield Sample(
                    *(prompt, len(prompt), self.multi_turn_output_len),
                    session=f"conversation {number}",
                    turn=turn,
                    adds=True,
                    delay_s=delay_s,
                )

    def _trace(self, vocabulary: DatasetVocabulary) -> list[Sample]:
        """Return the requests of a trace with random tokens, in the order of their times."""
        ids, made = _ordinary_ids(vocabulary), list[Sample]()
        for record in _read_trace(self._path(), self.trace_block_size):
            if self.trace_max_input_len is not None and record.input_len > self.trace_max_input_len:
                continue
            if len(made) == self.num_prompts:
                break
            tokens: list[int] = []
            for hash_id in record.hash_ids:
                words = (self.seed, *f"{record.scope} {hash_id}".encode())
                tokens += _random_ids(ids, record.block_size, np.random.default_rng(words))
            missing = max(0, record.input_len - len(tokens))
            tokens += _random_ids(ids, missing, np.random.default_rng((self.seed, 1, len(made))))
            prompt = tuple(tokens[: record.input_len])
            start_s = None if record.start_s is None else record.start_s / self.trace_speedup
            made.append(
                Sample(
                    *(prompt, len(prompt), min(record.output_len, self.trace_max_output_len or record.output_len)),
                    session=record.session,
                    adds=record.adds,
                    start_s=start_s,
                    delay_s=record.delay_s / self.trace_speedup,
                )
            )
        if not made:
            raise InvalidArgument("--dataset-path", f"{self.dataset_path} has no request that could be sent")
        return _with_turns(made)

    def _path(self) -> Path:
        if self.dataset_path is None:
            raise InvalidArgument("--dataset-path", "is missing")
        return self.dataset_path

    def _enough(self, samples: list[Sample], rng: np.random.Generator) -> list[Sample]:
        """Repeat samples of a file that has too few."""
        missing = self.num_prompts - len(samples)
        if not samples:
            raise InvalidArgument("--dataset-path", f"{self.dataset_path} has no request that could be sent")
        if missing <= 0 or self.no_oversample:
            return samples
        return samples + [samples[index] for index in rng.integers(0, len(samples), missing).tolist()]


def _bounds(length: int, ratio: float) -> tuple[int, int]:
    return math.floor(length * (1 - ratio)), math.ceil(length * (1 + ratio))


def _ordinary_ids(vocabulary: DatasetVocabulary) -> np.ndarray:
    return np.setdiff1d(np.arange(vocabulary.size), np.array(sorted(vocabulary.special_ids), np.int64))


def _random_ids(ids: np.ndarray, count: int, rng: np.random.Generator) -> tuple[int, ...]:
    return tuple(ids[rng.integers(0, ids.size, count)].tolist())


def _as_text(sample: Sample, vocabulary: DatasetVocabulary) -> Sample:
    """Convert a prompt of ids to text. A text that encodes to more tokens than the prompt is cut until it fits."""
    token_ids: Sequence[int] = [token_id for token_id in sample.prompt if isinstance(token_id, int)]
    text = ""
    for _ in range(_MAX_DECODES):
        text = vocabulary.decode(token_ids)
        again = list(vocabulary.encode(text))
        if len(again) <= len(sample.prompt):
            return replace(sample, prompt=text, prompt_len=len(again))
        token_ids = again[: len(sample.prompt)]
    return replace(sample, prompt=text, prompt_len=len(vocabulary.encode(text)))


def _first_turns(entry: Any) -> tuple[str, str] | None:
    """Return the texts of a conversation's first two turns, or None."""
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(turns, list) or len(turns) < 2:
        return None
    prompt, answer = (turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2])
    return (prompt, answer) if isinstance(prompt, str) and isinstance(answer, str) else None


def _custom_sample(line: str, where: str, output_len: int) -> Sample:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("--dataset-path", f"{where}: is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise InvalidArgument("--dataset-path", f"{where}: is not a JSON object")
    asked = fields.get("output_tokens", output_len)
    if not (isinstance(asked, int) and 1 <= asked <= _MAX_LEN):
        raise InvalidArgument("--dataset-path", f"{where}: output_tokens: {asked!r} is not from 1 to {_MAX_LEN}")
    text, ids = fields.get("prompt"), fields.get("prompt_token_ids")
    if isinstance(text, str) and text and ids is None:
        return Sample(text, None, asked)
    if text is None and isinstance(ids, list) and ids and all(_is_id(part) for part in ids):
        return Sample(tuple(ids), len(ids), asked)
    raise InvalidArgument("--dataset-path", f"{where}: one of prompt and prompt_token_ids is expected, not empty")


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """One recorded request.

    Attributes:
        hash_ids: blocks of the prompt; records with the same id and scope share a block.
        scope: file of the ids, or the session that they belong to.
        start_s, delay_s, session, adds: as in `Sample`, on the clock of the recording.
    """

    input_len: int
    output_len: int
    hash_ids: tuple[int, ...]
    block_size: int
    scope: str = ""
    session: str | None = None
    adds: bool = False
    start_s: float | None = None
    delay_s: float = 0.0


def _with_turns(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples with their positions in their sessions, and times from the first one."""
    counts: dict[str, int] = {}
    begin_s = min((sample.start_s for sample in samples if sample.start_s is not None), default=0.0)
    numbered = []
    for sample in samples:
        turn = 0 if sample.session is None else counts.get(sample.session, 0)
        if sample.session is not None:
            counts[sample.session] = turn + 1
        start_s = None if sample.start_s is None else sample.start_s - begin_s
        numbered.append(replace(sample, turn=turn, start_s=start_s, delay_s=sample.delay_s if turn else 0.0))
    return numbered


def _read_trace(path: Path, block_size: int) -> Iterator[TraceRecord]:
    """Yield the requests of a file, or of a folder's files by name, in the order of their times.

    Requests without a time follow their session's previous one.

    Raises:
        InvalidArgument: a file cannot be read or has another format; names the file and the line.
    """
    files = sorted(one for one in path.iterdir() if one.suffix in (".json", ".jsonl")) if path.is_dir() else [path]
    records: list[TraceRecord] = []
    for file in files:
        for where, value in _json_values(file):
            is_session = isinstance(value, dict) and "requests" in value
            records += _weka_records(where, value) if is_session else [_mooncake_record(where, value, block_size)]
    latest: dict[str | None, float] = {}
    keys = []
    for record in records:
        key = latest.get(record.session, 0.0) if record.start_s is None else record.start_s
        latest[record.session] = key
        keys.append(key)
    yield from (records[index] for index in sorted(range(len(records)), key=keys.__getitem__))


def _json_values(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the values of a file of one JSON value, or of one per line, and their places for errors."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidArgument("--dataset-path", f"{path} cannot be read: {error}") from error
    try:
        yield str(path), json.loads(text)
        return
    except (ValueError, RecursionError):
        lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield f"{path}: line {number}", json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InvalidArgument("--dataset-path", f"{path}: line {number}: is not JSON: {error}") from error


@dataclass(frozen=True, slots=True)
class _Fields:
    """Reads the fields of one JSON object of a trace."""

    where: str
    value: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, where: str, value: Any) -> _Fields:
        if not isinstance(value, dict):
            raise InvalidArgument("--dataset-path", f"{where}: is not a JSON object")
        return cls(where, value)

    def length(self, name: str) -> int:
        """Return a number of tokens from 1; 0 counts as 1, because every request has a token."""
        found = self.value.get(name)
        if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found <= _MAX_LEN:
            raise self.error(name, f"{found!r} is not from 0 to {_MAX_LEN}")
        return max(1, found)

    def seconds(self, name: str, per_second: float = 1.0) -> float | None:
        """Return a time in seconds; None if it is absent or null."""
        found = self.value.get(name)
        if found is None:
            return None
        if not isinstance(found, int | float) or isinstance(found, bool) or not 0 <= found <= _MAX_TIME:
            raise self.error(name, f"{str(found)[:_MAX_SHOWN]} is not a number from 0 to {_MAX_TIME:g}")
        return found / per_second

    def hash_ids(self, block_size: int, input_len: int) -> tuple[int, ...]:
        """Return the blocks of a prompt, up to the end of the prompt."""
        found = self.value.get("hash_ids") or []
        if not isinstance(found, list) or not all(_is_id(one) for one in found):
            raise self.error("hash_ids", "is not a list of numbers from 0")
        return tuple(found[: -(-input_len // block_size)])

    def error(self, name: str, problem: str) -> InvalidArgument:
        return InvalidArgument("--dataset-path", f"{self.where}: {name}: {problem}")


def _mooncake_record(where: str, value: Any, block_size: int) -> TraceRecord:
    fields = _Fields.of(where, value)
    for name in ("messages", "text_input", "payload"):
        if name in fields.value:
            raise fields.error(name, "is not supported: a trace has input_length and hash_ids")
    session, input_len = fields.value.get("session_id"), fields.length("input_length")
    if session is not None and not isinstance(session, str | int):
        raise fields.error("session_id", f"{session!r} is neither text nor a number")
    return TraceRecord(
        input_len=input_len,
        output_len=fields.length("output_length"),
        hash_ids=fields.hash_ids(block_size, input_len),
        block_size=block_size,
        session=None if session is None else str(session),
        adds=session is not None,
        start_s=fields.seconds("timestamp", 1e3),
        delay_s=fields.seconds("delay", 1e3) or 0.0,
    )


def _weka_records(where: str, value: Any) -> list[TraceRecord]:
    """Return the requests of an agent's session; each subagent is a session that starts at its time."""
    fields = _Fields.of(where, value)
    block_size = fields.length("block_size")
    scope = "" if fields.value.get("hash_id_scope", "local") == "global" else f"{where} {fields.value.get('id', '')}"
    return _agent_records(fields, f"{where} {fields.value.get('id', '')}", scope, block_size)


def _agent_records(agent: _Fields, session: str, scope: str, block_size: int, depth: int = 0) -> list[TraceRecord]:
    if depth > _MAX_SUBAGENTS:
        raise agent.error("requests", f"are nested deeper than the limit of {_MAX_SUBAGENTS}")
    entries = agent.value.get("requests")
    if not isinstance(entries, list):
        raise agent.error("requests", "is not a list")
    records, end_s = list[TraceRecord](), None
    for number, entry in enumerate(entries):
        fields = _Fields.of(f"{agent.where}: requests[{number}]", entry)
        if fields.value.get("type") == "subagent":
            records += _agent_records(fields, f"{session}/{number}", scope, block_size, depth + 1)
            continue
        start_s, input_len = fields.seconds("t"), fields.length("in")
        if start_s is None:
            raise fields.error("t", "is missing")
        think_s = fields.seconds("think_time")
        if think_s is None:
            think_s = 0.0 if end_s is None else max(0.0, start_s - end_s)
        records.append(
            TraceRecord(
                input_len=input_len,
                output_len=fields.length("out"),
                hash_ids=fields.hash_ids(block_size, input_len),
                block_size=block_size,
                scope=scope,
                session=session,
                start_s=start_s if end_s is None else None,
                delay_s=think_s,
            )
        )
        end_s = start_s + (fields.seconds("api_time") or 0.0)
    return records
