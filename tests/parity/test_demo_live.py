"""The packaged model, exported, against transformers in this process: whole rows of logits, and texts to their end."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.demo_model.export import export
from jpaged.demo.checkpoint import load_demo
from jpaged.models.model import model_for
from jpaged.types import SamplingParams
from tests.e2e.rig import generate, only, open_llm
from tests.models import dense

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    export(folder)
    return folder


@pytest.fixture(scope="module")
def theirs(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.parametrize("num_tokens", [1, 100, 384])
def test_logits_equal_those_of_transformers(theirs, num_tokens: int) -> None:
    config, params = load_demo(np.dtype(jnp.float32), "loop")
    token_ids = np.random.default_rng(num_tokens).integers(0, config.vocab_size, num_tokens).astype(np.int32)
    logits = dense.logits(model_for(config, np.dtype(jnp.float32)), params, token_ids, num_tokens)
    with torch.no_grad():
        want = theirs(torch.tensor(token_ids[None].astype(np.int64))).logits[0].numpy()
    np.testing.assert_allclose(logits, want, rtol=0, atol=1e-4)


@pytest.mark.long
def test_the_export_and_the_package_are_one_model_to_their_ends(folder: Path, theirs) -> None:
    """From both folders, and as transformers tells it, the story ends at the same token."""
    messages = [{"role": "user", "content": "Please tell me a bedtime story about a little star."}]
    how = SamplingParams(temperature=0.0, max_tokens=200, logprobs=0)
    options = {"max_model_len": 256, "num_blocks": 32}
    with open_llm("demo", **options) as llm:
        (output,) = llm.chat(messages, how)
    packaged, prompt = only(output), list(output.prompt_token_ids)
    with open_llm(folder, **options) as llm:
        exported = generate(llm, [prompt], how)[0]
    assert (exported.token_ids, exported.text) == (packaged.token_ids, packaged.text)
    with torch.no_grad():
        answer = theirs.generate(torch.tensor([prompt]), max_new_tokens=200, do_sample=False, pad_token_id=0)
    assert answer[0, len(prompt) :].tolist() == list(packaged.token_ids)
