"""The packaged draft model: small, found by its name, of the demo's vocabulary, and often right."""

import numpy as np
import pytest
from tokenizers import Tokenizer

from benchmarks.demo_model.acceptance import acceptance, continuations, matches, prompts
from benchmarks.demo_model.distil import TEMPERATURE, draft_config, learnt_prompts
from jpaged.checkpoints.hub import find_folder, read_config
from jpaged.demo import DRAFT_FOLDER, FOLDER
from jpaged.llm import LLM
from jpaged.types import SamplingParams

NUM_PROMPTS, NUM_TOKENS = 8, 64


def test_its_name_stands_for_a_small_model_of_the_demos_vocabulary():
    assert find_folder("demo-draft") == DRAFT_FOLDER
    draft, demo = read_config(DRAFT_FOLDER), read_config(FOLDER)
    assert (draft.vocab_size, draft.eos_token_ids) == (demo.vocab_size, demo.eos_token_ids)
    assert draft == draft_config(draft.hidden_size, draft.num_layers)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (DRAFT_FOLDER / name).read_bytes() == (FOLDER / name).read_bytes()
    assert sum(path.stat().st_size for path in DRAFT_FOLDER.iterdir()) < 1e6


@pytest.mark.long
def test_the_engine_serves_it():
    with LLM("demo-draft", num_blocks=32, max_num_seqs=1, max_num_batched_tokens=32, max_model_len=64) as llm:
        (output,) = llm.generate(["Once upon a time"], SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)
    assert output.outputs[0].text.startswith(", there ")


@pytest.mark.long
def test_no_prompt_that_measures_it_is_one_that_it_learnt_from():
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    learnt, asked = learnt_prompts(tokenizer), prompts(64)
    assert (len(learnt), len(asked)) == (192, 64)
    assert not {tuple(prompt) for prompt in learnt} & {tuple(prompt) for prompt in asked}


@pytest.mark.long
@pytest.mark.parametrize(("temperature", "floor"), [(0.0, 0.8), (TEMPERATURE, 0.7)])
def test_it_often_writes_what_the_demo_writes(temperature, floor):
    asked = prompts(NUM_PROMPTS)
    rows = continuations(asked, temperature, NUM_TOKENS)
    assert acceptance(matches(FOLDER, rows, asked, temperature))[0] > 0.99
    shares = acceptance(matches(DRAFT_FOLDER, rows, asked, temperature))
    assert shares[0] > floor
    assert shares == sorted(shares, reverse=True)


def test_runs_of_guesses_are_counted():
    right = [np.array([True, True, False, True, True, True])]
    assert acceptance(right)[:4] == [5 / 6, 3 / 5, 1 / 4, 0.0]
