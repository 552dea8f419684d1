"""The packaged model against transformers in this process: whole rows of logits, and texts to their end."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.checkpoints.hub import read_config
from jpaged.checkpoints.weights import load_params
from jpaged.demo import FOLDER
from jpaged.models.model import model_for
from jpaged.types import SamplingParams
from tests.e2e.rig import generate, only, open_llm
from tests.models import dense

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def theirs():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.parametrize("num_tokens", [1, 100, 384])
def test_logits_equal_those_of_transformers(theirs, num_tokens: int) -> None:
    config = read_config(FOLDER)
    model = model_for(config, np.dtype(jnp.float32))
    params = load_params(model, FOLDER, "loop")
    token_ids = np.random.default_rng(num_tokens).integers(0, config.vocab_size, num_tokens).astype(np.int32)
    logits = dense.logits(model, params, token_ids, num_tokens)
    with torch.no_grad():
        want = theirs(torch.tensor(token_ids[None].astype(np.int64))).logits[0].numpy()
    np.testing.assert_allclose(logits, want, rtol=0, atol=1e-4)


@pytest.mark.long
def test_the_name_the_folder_and_transformers_are_one_model_to_their_ends(theirs) -> None:
    """By its name, by its folder, and as transformers tells it, the story ends at the same token."""
    messages = [{"role": "user", "content": "Please tell me a bedtime story about a little star."}]
    how = SamplingParams(temperature=0.0, max_tokens=200, logprobs=0)
    options = {"max_model_len": 256, "num_blocks": 32}
    with open_llm("demo", **options) as llm:
        (output,) = llm.chat(messages, how)
    by_name, prompt = only(output), list(output.prompt_token_ids)
    with open_llm(FOLDER, **options) as llm:
        by_folder = generate(llm, [prompt], how)[0]
    assert (by_folder.token_ids, by_folder.text) == (by_name.token_ids, by_name.text)
    with torch.no_grad():
        answer = theirs.generate(torch.tensor([prompt]), max_new_tokens=200, do_sample=False, pad_token_id=0)
    assert answer[0, len(prompt) :].tolist() == list(by_name.token_ids)
