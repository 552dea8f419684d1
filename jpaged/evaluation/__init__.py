"""Model class for EleutherAI's lm-evaluation-harness: `lm_eval --model jpaged`.

harness.py     model class of the harness; the only file that imports it
__main__.py    the harness's command line, with the model registered
options.py     options in --model_args
runner.py      pairs of tokens -> log-probabilities, contexts -> texts: the harness's semantics, without the harness
pairs.py       pairs of tokens, grouped so that a context is computed once
generation.py  generation_kwargs of a task -> SamplingParams, and truncation of texts
texts.py       text <-> tokens with the harness's semantics
backends.py    engines for the runner: one in this process, or a server
"""
