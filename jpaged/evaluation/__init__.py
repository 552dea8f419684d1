"""jpaged as a model of EleutherAI's lm-evaluation-harness: `lm_eval --model jpaged`.

harness.py     the class that the harness knows; the only file that imports it
__main__.py    the harness's own command, with the model registered
options.py     what --model_args says
runner.py      pairs of tokens -> log-probabilities, contexts -> texts: the harness's meaning, without the harness
pairs.py       pairs of tokens, grouped so that a context is computed once
generation.py  what a task asks of generated text -> SamplingParams, and where texts are cut
texts.py       text <-> tokens as the harness means it
backends.py    what the runner asks of an engine: one in this process, or a server
"""
