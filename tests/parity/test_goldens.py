"""What transformers answered (goldens/, see `tests.parity.cases`): models alone, engines, the packaged model, beams."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jpaged.checkpoints.weights import load_params
from jpaged.device.compilation import compile as compile_module
from jpaged.device.executor import JaxExecutor
from jpaged.device.linear import pack_params
from jpaged.kernels import matmul
from jpaged.llm import LLM
from jpaged.models.hf_config import from_hf
from jpaged.models.layers import Params
from jpaged.models.model import Model
from jpaged.types import CompletionOutput, SamplingParams
from tests.conftest import QUICK_XLA_OPTIONS
from tests.e2e.rig import chosen_logprobs, generate, only, open_llm, random_prompts
from tests.models import dense
from tests.models.tiny import TinyCase, write_checkpoint
from tests.parity import cases
from tests.parity.cases import BeamCase, Found, beam_cases, check_search


def test_every_case_has_a_golden_file_and_every_file_a_case() -> None:
    names = {*cases.MODELS, "beams", "demo"}
    assert {cases.path_of(name) for name in names} == set(cases.GOLDENS.rglob("*.json"))


# --- models -----------------------------------------------------------------------------------------------------------


QUICK_MODELS = ("gemma3", "gemma4_text")
"""Windows, and keys that layers share."""


def read_model(name: str) -> dict[str, Any]:
    """A model's answers, whose tokens can be compared."""
    golden = cases.read(name)
    assert len(golden["tokens"]) == cases.NUM_TOKENS
    assert golden["smallest_gap"] > 1e-4
    return golden


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.long] * (name not in QUICK_MODELS))
        for name, case in cases.MODELS.items()
    ],
)
def test_logits_and_greedy_tokens_equal_those_of_transformers(case: TinyCase, tmp_path: Path) -> None:
    golden = read_model(case.name)
    model = Model(from_hf(case.config), np.dtype(jnp.float32))
    params = load_params(model, write_checkpoint(case, tmp_path), "loop")
    assert case.prompt() == golden["prompt"]
    check_logits(model, params, golden)
    packer = matmul.loaded().packer(SingleDeviceSharding(jax.devices()[0]))
    check_logits(model, pack_params(params, model.config, packer), golden)


def logits_on_the_way(model: Model, params: Params, token_ids: np.ndarray, prompt_len: int) -> jax.Array:
    """What follows each token as it is generated: from where a model turns all keys anew, with those."""
    logits, outgrown_len = dense.logits(model, params, token_ids, prompt_len), model.config.outgrown_len
    if outgrown_len is None or not prompt_len <= outgrown_len < len(token_ids):
        return logits
    turned_anew = dense.logits(model, params, token_ids, outgrown_len + 1)
    return jnp.concatenate([logits[:outgrown_len], turned_anew[outgrown_len:]])


def check_logits(model: Model, params: Params, golden: dict[str, Any]) -> None:
    prompt = golden["prompt"]
    logits = logits_on_the_way(model, params, np.array(prompt + golden["tokens"], np.int32), len(prompt))
    np.testing.assert_allclose(logits[jnp.array(golden["rows"])], golden["logits"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(logits[-2], golden["last_logits"], rtol=0, atol=1e-4)

    # Each token follows from those before it, so equal choices along the golden text are an equal greedy text.
    assert jnp.argmax(logits[len(prompt) - 1 : -1], axis=-1).tolist() == golden["tokens"]


# --- engines ----------------------------------------------------------------------------------------------------------

BLOCK_SIZES = (1, 8, 16, 32)
CHUNK_SIZES = (8, 11, 16, 32)
# Half of a Latin square: each case meets two block sizes and two chunk sizes, and over the cases all of those meet each
# other: the slots of a chunk are those of blocks, whatever the model.
LONG = [
    (name, BLOCK_SIZES[j], CHUNK_SIZES[(i // 4 + j) % 4])
    for i, name in enumerate(cases.MODELS)
    for j in (i % 4, (i + 2) % 4)
]
AS_SERVED = LONG[::2]
"""Once for each model, with every size: the programs of a server. What XLA makes of the rest is hardly optimised."""
OF_FAMILIES = [row for row in AS_SERVED if row[0] in cases.FAMILIES]
"""Once for each family, which is long; the rest is deep."""
QUICK = [(name, BLOCK_SIZES[i % 4], (8, 11, 16)[i % 3]) for i, name in enumerate([*cases.MODELS][::3])]
LONG_PROMPTS = ("llama3_tied", "llama3_new_style")  # of 90 tokens; the other models end at 128
TOP = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=20)


def log_softmax(logits: list[float]) -> np.ndarray:
    shifted = np.array(logits) - max(logits)
    return shifted - np.log(np.exp(shifted).sum())


def check_text(completion: CompletionOutput, golden: dict[str, Any], num_tokens: int) -> None:
    """64 tokens, or as many as the model's length allows, and the log-probabilities of the first and the last."""
    assert list(completion.token_ids) == golden["tokens"][:num_tokens]
    logprobs = chosen_logprobs(completion)
    first = log_softmax(golden["logits"][-1])[completion.token_ids[0]]
    assert logprobs[0] == pytest.approx(first, abs=1e-4)
    if num_tokens == cases.NUM_TOKENS:
        assert logprobs[-1] == pytest.approx(log_softmax(golden["last_logits"])[completion.token_ids[-1]], abs=1e-4)
    assert completion.cumulative_logprob == pytest.approx(sum(logprobs), abs=1e-4)


def check_distributions(completions: list[CompletionOutput], golden: dict[str, Any]) -> None:
    """The twenty likeliest tokens after the prompt's beginnings."""
    for completion, logits in zip(completions, golden["logits"], strict=True):
        assert completion.logprobs is not None
        (position,) = completion.logprobs
        want = log_softmax(logits)
        assert len(position.top) == 20
        logprobs = [token.logprob for token in position.top]
        np.testing.assert_allclose(logprobs, np.sort(want)[::-1][:20], rtol=0, atol=1e-4)
        np.testing.assert_allclose(logprobs, want[[token.token_id for token in position.top]], rtol=0, atol=1e-4)


def check_alone_and_in_company(name: str, folder: Path, block_size: int, chunk: int) -> None:
    """The golden prompt by itself; then with its own beginnings and three strangers of other lengths."""
    golden, limit = read_model(name), 160 if name in LONG_PROMPTS else 128
    prompt = golden["prompt"]
    num_tokens = min(cases.NUM_TOKENS, limit - len(prompt))
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=0)
    # Some ropes turn a prompt by its whole length once that is beyond the original one.
    is_turned_otherwise = (from_hf(cases.MODELS[name].config).max_prefix_len or limit) < len(prompt)
    beginnings = [] if is_turned_otherwise else [prompt[: row + 1] for row in golden["rows"]]
    strangers = random_prompts([1, 9, 33, 17, 60, 5, 2][len(beginnings) :], seed=len(prompt))
    others = [*beginnings, *strangers]
    options = {"block_size": block_size, "max_num_batched_tokens": chunk, "max_model_len": limit}
    write_checkpoint(cases.MODELS[name], folder)
    with open_llm(folder, num_blocks=8 * -(-limit // block_size), **options) as llm:
        check_text(generate(llm, [prompt], params)[0], golden, num_tokens)
        completions = generate(
            llm, [*others[:5], prompt, *others[5:]], [*[TOP] * len(beginnings), *[params] * (8 - len(beginnings))]
        )
    check_text(completions[5], golden, num_tokens)
    if beginnings:
        check_distributions(completions[:4], golden)


@pytest.mark.long
@pytest.mark.parametrize(("name", "block_size", "chunk"), QUICK)
def test_tokens_equal_those_of_transformers(name: str, block_size: int, chunk: int, tmp_path: Path) -> None:
    check_alone_and_in_company(name, tmp_path, block_size, chunk)


@pytest.mark.parametrize(
    ("name", "block_size", "chunk"),
    [pytest.param(*row, marks=pytest.mark.long if row in OF_FAMILIES else pytest.mark.deep) for row in LONG],
)
def test_tokens_equal_in_blocks_and_chunks_of_every_size(
    name: str, block_size: int, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (name, block_size, chunk) not in AS_SERVED:
        monkeypatch.setitem(compile_module._COMPILER_OPTIONS, "cpu", QUICK_XLA_OPTIONS)
    check_alone_and_in_company(name, tmp_path, block_size, chunk)


def test_the_sizes_cover_all_pairs() -> None:
    assert {row[1:] for row in LONG} == set(itertools.product(BLOCK_SIZES, CHUNK_SIZES))
    for name in cases.MODELS:
        assert [len({row[i] for row in LONG if row[0] == name}) for i in (1, 2)] == [2, 2]
    assert [name for name, _, _ in AS_SERVED] == [*cases.MODELS]
    assert [name for name, _, _ in OF_FAMILIES] == [name for name in cases.MODELS if name in cases.FAMILIES]
    for rows in (AS_SERVED, OF_FAMILIES):
        assert {block_size for _, block_size, _ in rows} == set(BLOCK_SIZES)


# --- the packaged model -----------------------------------------------------------------------------------------------

DEMO = SamplingParams(temperature=0.0, max_tokens=cases.NUM_TOKENS, ignore_eos=True, logprobs=cases.DEMO_NUM_TOP)


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with open_llm("demo", max_num_batched_tokens=16, max_model_len=256, num_blocks=64) as llm:
        yield llm


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    """One for each prompt of `cases.DEMO_PROMPTS`."""
    answers = cases.read("demo")["answers"]
    for answer, asked in zip(answers, cases.DEMO_PROMPTS, strict=True):
        assert asked.items() <= answer.items()
        assert len(answer["tokens"]) == cases.NUM_TOKENS
        assert answer["smallest_gap"] > 3e-4
    return answers


def check_answer(completion: CompletionOutput, answer: dict[str, Any]) -> None:
    """The same tokens, and at each place the same likeliest tokens with the same log-probabilities."""
    assert list(completion.token_ids) == answer["tokens"]
    assert completion.logprobs is not None
    for position, ids, logprobs in zip(completion.logprobs, answer["top_ids"], answer["top_logprobs"], strict=True):
        assert len(position.top) == cases.DEMO_NUM_TOP
        np.testing.assert_allclose([t.logprob for t in position.top], logprobs, rtol=0, atol=1e-4)
        # Tokens closer than rounding may change places.
        theirs = dict(zip(ids, logprobs, strict=True))
        for token in position.top:
            assert token.logprob == pytest.approx(theirs.get(token.token_id, logprobs[-1]), abs=1e-4)


def test_chats_and_texts_continue_as_with_transformers(demo: LLM, answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        ask = demo.chat if "messages" in answer else demo.generate
        (output,) = ask(answer["messages"] if "messages" in answer else answer["prompt"], DEMO)
        assert list(output.prompt_token_ids) == answer["prompt_token_ids"]
        check_answer(only(output), answer)


@pytest.mark.long
def test_company_changes_no_answer(demo: LLM, answers: list[dict[str, Any]]) -> None:
    prompts = [answer["prompt_token_ids"] for answer in answers] + random_prompts([1, 30, 7, 60])
    for completion, answer in zip(generate(demo, prompts, DEMO)[:4], answers, strict=True):
        check_answer(completion, answer)


def test_its_text_is_that_of_its_tokens(demo: LLM) -> None:
    """Streamed piece by piece, the text is what decoding all tokens at once gives."""
    (output,) = demo.chat([{"role": "user", "content": "Tell me a story about an old robot."}], DEMO)
    completion = only(output)
    whole = demo._serving.tokenizer.decode(completion.token_ids)
    assert completion.text == whole
    assert len(whole.split()) > 20


# --- beam searches ----------------------------------------------------------------------------------------------------

SEARCHES = cases.read("beams")["searches"]


@pytest.mark.thinned(5)
@pytest.mark.parametrize("case", beam_cases(), ids=lambda case: case.name)
def test_a_search_finds_what_transformers_found(executor: JaxExecutor, case: BeamCase) -> None:
    check_search(executor, case, [Found(**sequence) for sequence in SEARCHES[case.name]])


def test_the_searches_are_of_these_cases_and_end_both_ways() -> None:
    assert set(SEARCHES) == {case.name for case in beam_cases()}
    ends = [
        sequence["token_ids"][-1] in case.eos_token_ids and len(sequence["token_ids"]) < case.max_tokens
        for case in beam_cases()
        for sequence in SEARCHES[case.name]
    ]
    assert 50 < sum(ends) < len(ends) - 50
