"""Bodies of calls that generate no text, and their response bodies. No I/O.

    /v1/embeddings  {"input": text, texts, token ids or lists of them}   -> a vector for each
    /v1/score       {"text_1": text or texts, "text_2": likewise}        -> the cosine of each pair's vectors
    /v1/score       {"prompt": ..., "continuations": [...]}              -> the log-probability of each continuation
    /v1/rerank      {"query": text, "documents": texts}                  -> the documents by similarity to the query
    /pooling        {"input": ..., "task": "embed"}                      -> a vector for each
    /pooling        {"input": ..., "task": "token_embed"}                -> a vector for each token of each
    /classify       {"input": ...}                                       -> an error: no model has such a head

Each may have `adapter`, `cache_salt` and `priority`, as completions, and embeddings `normalize`; `user` is ignored. The
first is OpenAI's (https://platform.openai.com/docs/api-reference/embeddings), the third specific to jpaged, the others
vLLM's (https://docs.vllm.ai/en/v0.9.0/serving/openai_compatible_server.html).

    /tokenize    {"prompt": text, "add_special_tokens": true}   -> the ids of a text
    /tokenize    {"messages": [...], "tools": [...]}            -> the ids of a chat, up to the assistant's turn
    /detokenize  {"tokens": [...]}                              -> their text

The last three are vLLM's (https://docs.vllm.ai/en/v0.9.0/serving/openai_compatible_server.html).
"""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from jpaged import json_text
from jpaged.chat import ChatOptions
from jpaged.errors import InternalError, InvalidArgument
from jpaged.json_text import Items
from jpaged.openai.request import (
    CHAT_FIELDS,
    LenientBody,
    chat_options_in,
    flag_in,
    messages_in,
    name_in,
    own_fields,
    shown,
    truncation_side_in,
)
from jpaged.sampling_params import POOLING_TASKS
from jpaged.types import Pooling, Prompt, SamplingParams, Score, TokenLogprob

_T = TypeVar("_T")

Text = str | tuple[int, ...]
"""A text, or its token ids."""

MAX_INPUTS = 2048
"""Maximum inputs, pairs or continuations of a body; OpenAI's limit for the inputs of an embeddings request."""
POOLINGS: tuple[Pooling, ...] = ("last", "mean", "cls", "max", "weightedmean", "mean_sqrt_len_tokens")
"""Poolings of an input's hidden states into one vector; models that generate have only the first two."""
_NORMALIZE = ("normalize", "use_activation")
ENCODINGS = ("float", "base64", "bytes", "bytes_only")
"""Encodings of vectors: numbers, their bytes as text, and bodies of bytes, of which `bytes` has a header."""
DTYPES: Mapping[str, DTypeLike] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}
"""Types of the numbers in bytes."""
_E4M3_MAX = 448.0
BYTE_ORDERS = ("native", "little", "big")
"""Orders of their bytes; the native one is little-endian, as on every supported processor."""


def check_truncation(limit: int | None, max_model_len: int) -> None:
    """Raise InvalidArgument if inputs are to be cut to more tokens than the model takes, as vLLM does."""
    if limit is not None and limit > max_model_len:
        problem = f"{limit} is over max_model_len ({max_model_len}): request a smaller truncation size"
        raise InvalidArgument("truncate_prompt_tokens", problem)


@dataclass(frozen=True, slots=True)
class How:
    """Common options of every body: fields as of a body of completions.

    Attributes:
        truncate_prompt_tokens: maximum tokens of an input, the last or the first by `truncation_side`; -1 for the
            model's limit, None refuses longer inputs.
    """

    model: str | None = None
    adapter: str = ""
    cache_salt: str = ""
    priority: int = 0
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "left"

    def truncated(self, token_ids: Sequence[int], max_model_len: int) -> tuple[int, ...]:
        """Return the tokens of an input that are kept.

        Raises:
            InvalidArgument: `truncate_prompt_tokens` exceeds the model's limit.
        """
        limit = self.truncate_prompt_tokens
        if limit is None:
            return tuple(token_ids)
        check_truncation(limit, max_model_len)
        limit = max_model_len if limit == -1 else limit
        return tuple(token_ids[:limit] if self.truncation_side == "right" else token_ids[-limit:])


class Binary(NamedTuple):
    """A vector or an array as bytes."""

    content: bytes
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EmbedJob:
    """A parsed body of /v1/embeddings.

    Attributes:
        encoding: one of `ENCODINGS`: numbers, or the bytes of `dtype`, as base64 or as the body.
        dtype: one of `DTYPES`.
        is_big_endian: their bytes are in big-endian order.
        add_special_tokens: add the tokenizer's special tokens to texts.
        pooling: None for the model's own.
        dimensions: required width of a vector; None for any.
        normalize: scale vectors to length 1; None leaves it to the model.
        prompt_name: the model's prompt to put before texts; None for its default.
        messages: a chat instead of inputs; None for inputs.
    """

    inputs: tuple[Text, ...]
    how: How = How()
    pooling: Pooling | None = None
    encoding: str = ENCODINGS[0]
    dimensions: int | None = None
    normalize: bool | None = None
    prompt_name: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    chat_options: ChatOptions = ChatOptions()  # noqa: RUF009 - frozen
    dtype: str = "float32"
    is_big_endian: bool = False
    add_special_tokens: bool = True

    @property
    def is_binary(self) -> bool:
        """True if the response is no JSON."""
        return self.encoding in ("bytes", "bytes_only")

    def encoded(self, values: Sequence[float] | NDArray[np.float32]) -> list[float] | str | Binary:
        """Return a vector, or an array as bytes, in the encoding of the job."""
        if self.encoding == "float":
            return [float(number) for number in values]
        dtype, found = np.dtype(DTYPES[self.dtype]), np.asarray(values, np.float32)
        if dtype == ml_dtypes.float8_e4m3fn:  # has no infinity
            found = np.clip(found, -_E4M3_MAX, _E4M3_MAX)
        with np.errstate(over="ignore"):  # infinity, as in vLLM
            found = found.astype(dtype)
        order = ">" if self.is_big_endian else "<"
        content = found.view(f"u{found.itemsize}").astype(f"{order}u{found.itemsize}").tobytes()
        return Binary(content, found.shape) if self.is_binary else base64.b64encode(content).decode()

    def binary_body(self, body: Mapping[str, Any]) -> tuple[bytes, str]:
        """Return the bytes of a response's vectors, and the rest of it as JSON: vLLM's header `metadata`."""
        order, end = "big" if self.is_big_endian else "native", 0
        contents, items = list[bytes](), list[dict[str, Any]]()
        for one in body["data"]:
            content, shape = one.get("embedding") or one["data"]
            where: dict[str, Any] = {"start": end, "end": (end := end + len(content)), "shape": shape}
            items.append({"index": one["index"], "embed_dtype": self.dtype, "endianness": order, **where})
            contents.append(content)
        return b"".join(contents), json_text.dumps({**body, "data": items})


@dataclass(frozen=True, slots=True)
class ClassifyJob(EmbedJob):
    """A parsed body of /classify; `normalize` is its `use_activation`.

    Attributes:
        request_id: id of the response, after "classify-".
    """

    request_id: str = ""


@dataclass(frozen=True, slots=True)
class PoolingJob(EmbedJob):
    """A parsed body of /pooling.

    Attributes:
        task: one of `POOLING_TASKS`, or of `HEAD_TASKS`, of which classifiers support the first one.
        request_id: id of the response, after "pooling-".
    """

    task: str = POOLING_TASKS[0]
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class ScoreJob:
    """Continuations of a prompt to score."""

    prompt: Text
    continuations: tuple[Text, ...]
    how: How = How()


@dataclass(frozen=True, slots=True)
class SimilarityJob:
    """Pairs of texts whose vectors are compared.

    Attributes:
        top_n: number of documents to rank by their similarity to the query, which is the first text of each pair;
            None returns similarities in the order of the pairs.
        use_activation: return scores of a cross-encoder, not its logits; similarities do not depend on it.
        max_tokens: tokens to which the first and the second texts are cut, each; 0 leaves them as they are.
        name: the caller's name of the first texts, for errors.
    """

    pairs: tuple[tuple[str, str], ...]
    how: How = How()
    pooling: Pooling | None = None
    top_n: int | None = None
    use_activation: bool = True
    max_tokens: tuple[int, int] = (0, 0)
    name: str = field(default="text_1", compare=False)

    @property
    def texts(self) -> tuple[str, ...]:
        """Every distinct text of the pairs."""
        return tuple(dict.fromkeys(text for pair in self.pairs for text in pair))


_OF_ALL = {one.name for one in fields(How)}
_OF_VECTORS = {"encoding_format", "embed_dtype", "endianness", "dimensions"}
OF_EMBEDDINGS = {
    *_OF_ALL,
    *_OF_VECTORS,
    *("input", "pooling", "normalize", "prompt_name", "user", "use_activation", "add_special_tokens"),
}
OF_EMBEDDED_CHATS = {
    *(OF_EMBEDDINGS - {"input"}),
    *("messages", "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
}
_TEXTS_1, _TEXTS_2 = ("text_1", "queries", "data_1"), ("text_2", "documents", "items", "data_2")
"""Names of the texts of pairs; vLLM accepts each."""
_MAX_TOKENS = ("max_tokens_per_query", "max_tokens_per_doc")
_OF_PAIRS = {*_OF_ALL, *_MAX_TOKENS, "pooling", "use_activation"}
_OF_SIMILARITIES = {*_OF_PAIRS, *_TEXTS_1, *_TEXTS_2}
_OF_LOGLIKELIHOODS = {*_OF_ALL, "prompt", "continuations"} - {"truncate_prompt_tokens", "truncation_side"}
OF_RERANKING = {*_OF_PAIRS, "query", "documents", "top_n", "return_documents"}
OF_SCORES = _OF_SIMILARITIES | _OF_LOGLIKELIHOODS
OF_CLASSIFYING = {*_OF_ALL, "input", "user", "use_activation", "add_special_tokens", "request_id"}
OF_CLASSIFIED_CHATS = {*(OF_CLASSIFYING - {"input"}), *(OF_EMBEDDED_CHATS - OF_EMBEDDINGS)}
OF_POOLING = {*OF_CLASSIFYING, *_OF_VECTORS, "task"}
OF_POOLED_CHATS = {*OF_CLASSIFIED_CHATS, *_OF_VECTORS, "task"}
HEAD_TASKS = ("classify", "token_classify", "embed&token_classify")
"""vLLM's tasks of models with a classification head."""
_OTHER_TASKS = {"encode": "use token_embed", "score": "use /score", "plugin": "plugins are not supported"}
ScoringJob = EmbedJob | ScoreJob | SimilarityJob


def score_job(given: Mapping[str, Any]) -> ScoreJob | SimilarityJob:
    """Parse a body of /v1/score.

    Raises:
        InvalidArgument: a field is unknown, invalid, or cannot be honored.
    """
    body = own_fields("/v1/score", given, OF_SCORES)
    is_ours = "prompt" in body or "continuations" in body
    return _loglikelihood_job(body) if is_ours else _similarity_job(body)


def embed_job(as_given: Mapping[str, Any]) -> EmbedJob:
    """Parse a body of /v1/embeddings.

    Raises:
        InvalidArgument: as `score_job`.
    """
    own = OF_EMBEDDED_CHATS if as_given.get("messages") is not None else OF_EMBEDDINGS
    body = own_fields("/v1/embeddings", as_given, own)
    flags = [flag_in(body, name, default=False) for name in _NORMALIZE if body.get(name) is not None]
    if len(set(flags)) > 1:
        raise InvalidArgument("use_activation", "conflicts with normalize: give only one of them")
    return EmbedJob(
        **_embed_fields(body, own),
        pooling=_pooling(body),
        normalize=flags[0] if flags else None,
        prompt_name=name_in(body, "prompt_name"),
    )


def pooling_job(as_given: Mapping[str, Any]) -> PoolingJob:
    """Parse a body of /pooling; vectors have length 1 by default, as in vLLM.

    Raises:
        InvalidArgument: as `score_job`.
    """
    own = OF_POOLED_CHATS if as_given.get("messages") is not None else OF_POOLING
    body = own_fields("/pooling", as_given, own)
    task = name_in(body, "task") or POOLING_TASKS[0]
    if task not in (*POOLING_TASKS, *HEAD_TASKS):
        advice = _OTHER_TASKS.get(task, f"must be one of {', '.join(POOLING_TASKS)}")
        raise InvalidArgument("task", f"{shown(task)} is not supported: {advice}")
    return PoolingJob(
        **_embed_fields(body, own),
        pooling="all" if task == "token_embed" else None,
        normalize=flag_in(body, "use_activation", default=True),
        task=task,
        request_id=name_in(body, "request_id") or "",
    )


def classify_job(as_given: Mapping[str, Any]) -> ClassifyJob:
    """Parse a body of /classify; raise as `score_job`."""
    own = OF_CLASSIFIED_CHATS if as_given.get("messages") is not None else OF_CLASSIFYING
    body = own_fields("/classify", as_given, own)
    return ClassifyJob(
        **_embed_fields(body, own),
        normalize=flag_in(body, "use_activation", default=True),
        request_id=name_in(body, "request_id") or "",
    )


def _embed_fields(body: dict[str, Any], own: set[str]) -> dict[str, Any]:
    """Return the common fields of jobs that read inputs or a chat, by the names of an EmbedJob."""
    found: dict[str, Any] = {"how": _how(body, own), "inputs": ()}
    name_in(body, "user")
    if "messages" in own:
        body.setdefault("add_generation_prompt", False)
        found |= {"messages": messages_in(body), "chat_options": chat_options_in(body)}
    else:
        given = body.get("input")
        is_one = isinstance(given, str) or (isinstance(given, list) and any(type(one) is int for one in given))
        found["inputs"] = _texts("input", [given] if is_one else given)
        found["add_special_tokens"] = flag_in(body, "add_special_tokens", default=True)
    dimensions = body.get("dimensions")
    if dimensions is not None and (type(dimensions) is not int or dimensions < 1):
        raise InvalidArgument("dimensions", f"{shown(dimensions)} is not an integer of 1 or more")
    return found | {
        "dimensions": dimensions,
        "encoding": _choice(body, "encoding_format", ENCODINGS),
        "dtype": _choice(body, "embed_dtype", tuple(DTYPES)),
        "is_big_endian": _choice(body, "endianness", BYTE_ORDERS) == "big",
    }


def rerank_job(given: Mapping[str, Any]) -> SimilarityJob:
    """Parse a body of /v1/rerank; the documents are compared with the query.

    Raises:
        InvalidArgument: as `score_job`.
    """
    body = own_fields("/v1/rerank", given, OF_RERANKING)
    how = _how(body, OF_RERANKING)
    query, documents = _strings("query", [_text_of_object(body, "query", body.get("query"))]), body.get("documents")
    if isinstance(documents, list):
        documents = [_text_of_object(body, "documents", one) for one in documents]
    documents = _strings("documents", documents)
    flag_in(body, "return_documents", default=True)
    top_n, pairs = _count(body, "top_n"), tuple((query[0], one) for one in documents)
    return SimilarityJob(pairs, how, **_pair_fields(body), top_n=top_n or len(pairs), name="query")


def _text_of_object(body: Mapping[str, Any], field: str, given: Any) -> Any:
    """Return the text of an object of Jina's and Cohere's APIs; other values unchanged."""
    if not isinstance(given, dict) or "text" not in given:
        return given
    for name in sorted(given.keys() - {"text"}):
        if not isinstance(body, LenientBody):
            raise InvalidArgument(f"{field}.{name[:80]}", "is not supported: only text is")
        body.ignore(f"{field}.{name}")
    return given["text"]


def _loglikelihood_job(body: Mapping[str, Any]) -> ScoreJob:
    how = _how(body, _OF_LOGLIKELIHOODS)
    (prompt,) = _texts("prompt", [body.get("prompt")])
    return ScoreJob(prompt, _texts("continuations", body.get("continuations")), how)


def _similarity_job(body: Mapping[str, Any]) -> SimilarityJob:
    how = _how(body, _OF_SIMILARITIES)
    names = [_only_name(body, some) for some in (_TEXTS_1, _TEXTS_2)]
    left, right = (_strings(name, body.get(name)) for name in names)
    if len(left) == 1:
        left *= len(right)
    if len(left) != len(right):
        raise InvalidArgument(
            names[1], f"{len(right)} texts for {len(left)} of {names[0]}: give 1 {names[0]}, or the same number"
        )
    pairs = tuple(zip(left, right, strict=True))
    return SimilarityJob(pairs, how, **_pair_fields(body), name=names[0])


def _pair_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the common fields of bodies with pairs, by the names of a SimilarityJob."""
    return {
        "pooling": _pooling(body),
        "use_activation": flag_in(body, "use_activation", default=True),
        "max_tokens": tuple(_count(body, name) for name in _MAX_TOKENS),
    }


def _count(body: Mapping[str, Any], name: str) -> int:
    count: Any = body.get(name, 0)
    if type(count) is not int or count < 0:
        raise InvalidArgument(name, f"{shown(count)} is not an integer of 0 or more")
    return count


def _only_name(body: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the name that a body uses of several for one field; the first one if it uses none."""
    used = [name for name in names if body.get(name, []) != []]
    if len(used) > 1:
        raise InvalidArgument(used[1], f"conflicts with {used[0]}: give only one of them")
    return (*used, *(name for name in names if name in body), names[0])[0]


def _how(body: Mapping[str, Any], own: set[str]) -> How:
    """Return the common options of a body; reject unknown fields."""
    for name in body.keys() - own:
        raise InvalidArgument(name[:80], f"is not supported with {', '.join(sorted(own - _OF_ALL))}")
    values = {name: body[name] for name in ("cache_salt", "priority", "truncate_prompt_tokens") if name in body}
    try:
        SamplingParams(**values)
    except InvalidArgument as error:
        raise InvalidArgument(error.field.replace("sampling.", ""), error.problem) from error
    values["truncation_side"] = truncation_side_in(body)
    return How(name_in(body, "model") or None, name_in(body, "adapter") or "", **values)


def _pooling(body: Mapping[str, Any]) -> Pooling | None:
    return None if body.get("pooling") is None else _choice(body, "pooling", POOLINGS)


def _choice(body: Mapping[str, Any], name: str, choices: tuple[_T, ...]) -> _T:
    value = body.get(name, choices[0])
    for choice in choices:
        if choice == value:
            return choice
    raise InvalidArgument(name, f"{shown(value)} is not one of {', '.join(map(str, choices))}")


def _texts(field: str, values: Any) -> tuple[Text, ...]:
    """Return texts and lists of token ids; reject empty ones."""
    return tuple(_text(field, value) for value in _listed(field, values))


def _text(field: str, value: Any) -> Text:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(one) is int and one >= 0 for one in value):
        return tuple(value)
    raise InvalidArgument(field, f"{str(value)[:80]!r} is neither a non-empty string nor a list of token ids")


def _strings(field: str, values: Any) -> list[str]:
    texts = _listed(field, [values] if isinstance(values, str) else values)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise InvalidArgument(field, f"{str(text)[:80]!r} is not a non-empty string")
    return texts


def _listed(field: str, values: Any) -> list[Any]:
    if not isinstance(values, list) or not values:
        raise InvalidArgument(field, "must be a non-empty list")
    if len(values) > MAX_INPUTS:
        raise InvalidArgument(field, f"{len(values)} are over the limit of {MAX_INPUTS}")
    return values


def embeddings_body(
    job: EmbedJob, vectors: Sequence[Sequence[float]], *, model: str, prompt_tokens: int
) -> dict[str, Any]:
    """Return the response to an EmbedJob; raise InvalidArgument if the vectors do not have the required width."""
    _require_one_each(job.inputs, vectors)
    check_dimensions(job, len(vectors[0]))

    def data() -> Iterator[dict[str, Any]]:
        for i, vector in enumerate(vectors):
            yield {"object": "embedding", "index": i, "embedding": job.encoded(vector)}

    return _body(model, Items(data), prompt_tokens)


def pooling_body(
    job: PoolingJob, found: Sequence[Sequence[float] | NDArray[np.float32]], *, model: str, prompt_tokens: int
) -> dict[str, Any]:
    """Return the response to a PoolingJob: a vector `[E]` or an array `[T, E]` for each input."""
    _require_one_each(job.inputs, found)
    check_dimensions(job, np.shape(found[0])[-1])

    def data() -> Iterator[dict[str, Any]]:
        for i, values in enumerate(found):
            if isinstance(values, np.ndarray) and job.encoding == "float":
                yield {"index": i, "object": "pooling", "data": Items(partial(_rows, values))}
            else:
                yield {"index": i, "object": "pooling", "data": job.encoded(values)}

    return {"id": f"pooling-{job.request_id}", **_body(model, Items(data), prompt_tokens)}


def classification_body(
    job: ClassifyJob, found: Sequence[Sequence[float]], labels: Sequence[str], *, model: str, prompt_tokens: int
) -> dict[str, Any]:
    """Return the response to a body of /classify: for each input the likeliest label, and the probability of each."""
    _require_one_each(job.inputs, found)
    data = [
        {
            "index": i,
            "label": labels[max(range(len(values)), key=values.__getitem__)],
            "probs": list(values),
            "num_classes": len(values),
        }
        for i, values in enumerate(found)
    ]
    return {"id": f"classify-{job.request_id}", **_body(model, data, prompt_tokens)}


def _rows(values_te: NDArray[np.float32]) -> Iterator[list[float]]:
    for values_e in values_te:
        yield values_e.tolist()


def check_dimensions(job: EmbedJob, width: int) -> None:
    """Raise InvalidArgument if the caller requires vectors of another width; there are no shorter ones."""
    if job.dimensions not in (None, width):
        raise InvalidArgument(
            "dimensions", f"{job.dimensions} is not supported: the model's vectors have {width} dimensions"
        )


def loglikelihoods_body(job: ScoreJob, scores: Sequence[Score], *, model: str, prompt_tokens: int) -> dict[str, Any]:
    """Return the response to a ScoreJob: natural logarithms, and whether greedy decoding gives the same tokens."""
    _require_one_each(job.continuations, scores)

    def data() -> Iterator[dict[str, Any]]:
        for i, score in enumerate(scores):
            yield {
                "object": "loglikelihood",
                "index": i,
                "logprob": score.logprob,
                "is_greedy": score.is_greedy,
                "tokens": [_token_entry(token) for token in score.tokens],
            }

    return _body(model, Items(data), prompt_tokens)


def _token_entry(token: TokenLogprob) -> dict[str, Any]:
    return {"token_id": token.token_id, "logprob": token.logprob, "rank": token.rank}


def similarities_body(
    job: SimilarityJob, vectors: Sequence[Sequence[float]], *, model: str, prompt_tokens: int
) -> dict[str, Any]:
    """Return the response to a SimilarityJob: the cosine of each pair, from the vectors of `job.texts`."""
    _require_one_each(job.texts, vectors)
    units = {text: _unit(vector) for text, vector in zip(job.texts, vectors, strict=True)}
    scores = [float(units[left] @ units[right]) for left, right in job.pairs]
    return scores_body(job, scores, model=model, prompt_tokens=prompt_tokens)


def scores_body(job: SimilarityJob, scores: Sequence[float], *, model: str, prompt_tokens: int) -> dict[str, Any]:
    """Return the response to a SimilarityJob, from the score of each pair."""
    _require_one_each(job.pairs, scores)
    if job.top_n is not None:
        ranks = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: job.top_n]
        results = [{"index": i, "document": {"text": job.pairs[i][1]}, "relevance_score": scores[i]} for i in ranks]
        usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
        return {"id": f"rerank-{uuid.uuid4().hex}", "model": model, "usage": usage, "results": results}
    data = [{"object": "score", "index": i, "score": score} for i, score in enumerate(scores)]
    return _body(model, data, prompt_tokens)


def _body(model: str, data: Iterable[object], prompt_tokens: int) -> dict[str, Any]:
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return {"object": "list", "created": int(time.time()), "model": model, "data": data, "usage": usage}


def _require_one_each(asked: Sequence[object], answered: Sequence[object]) -> None:
    if len(answered) != len(asked):
        raise InternalError(f"the server answered {len(answered)} of {len(asked)} inputs")


def _unit(vector: Sequence[float]) -> np.ndarray:
    array = np.asarray(vector, np.float64)
    return array / max(float(np.linalg.norm(array)), 1e-300)


OF_TOKENIZED_TEXTS = {"model", "prompt", "add_special_tokens", "return_token_strs"}
OF_TOKENIZED_CHATS = {"model", "return_token_strs", "add_special_tokens", *CHAT_FIELDS}
OF_DETOKENIZING = {"model", "tokens", "skip_special_tokens"}


@dataclass(frozen=True, slots=True)
class TokenizeJob:
    """A text or a chat to tokenize.

    Attributes:
        wants_texts: also return the text of each token.
    """

    prompt: Prompt
    add_special_tokens: bool = True
    wants_texts: bool = False
    model: str | None = None


@dataclass(frozen=True, slots=True)
class DetokenizeJob:
    """Token ids to detokenize."""

    token_ids: tuple[int, ...]
    skip_special_tokens: bool = False
    model: str | None = None


def parse_tokenize_job(given: Mapping[str, Any]) -> TokenizeJob:
    """Parse a body of /tokenize.

    Raises:
        InvalidArgument: a field is unknown, invalid, or cannot be honored.
    """
    if (given.get("prompt") is None) == (given.get("messages") is None):
        raise InvalidArgument("prompt", "give exactly one of prompt and messages")
    is_text = given.get("prompt") is not None
    body = own_fields("/tokenize", given, OF_TOKENIZED_TEXTS if is_text else OF_TOKENIZED_CHATS)
    wants_texts, model = flag_in(body, "return_token_strs", default=False), name_in(body, "model") or None
    if is_text:
        if not isinstance(body["prompt"], str):
            raise InvalidArgument("prompt", f"{str(body['prompt'])[:80]!r} is not a string")
        adds = flag_in(body, "add_special_tokens", default=True)
        return TokenizeJob(Prompt(text=body["prompt"]), adds, wants_texts, model)
    prompt = Prompt(messages=messages_in(body), chat_options=chat_options_in(body))
    return TokenizeJob(prompt, wants_texts=wants_texts, model=model)


def tokenized_body(token_ids: Sequence[int], texts: Sequence[str] | None, *, max_model_len: int) -> dict[str, Any]:
    """Return the response to a TokenizeJob."""
    told = None if texts is None else list(texts)
    return {"count": len(token_ids), "max_model_len": max_model_len, "tokens": list(token_ids), "token_strs": told}


def parse_detokenize_job(given: Mapping[str, Any]) -> DetokenizeJob:
    """Parse a body of /detokenize; raise as `parse_tokenize_job` does."""
    body = own_fields("/detokenize", given, OF_DETOKENIZING)
    token_ids = body.get("tokens")
    if not isinstance(token_ids, list) or not all(type(one) is int for one in token_ids):
        raise InvalidArgument("tokens", "must be a list of token ids")
    skips = flag_in(body, "skip_special_tokens", default=False)
    return DetokenizeJob(tuple(token_ids), skips, name_in(body, "model") or None)
