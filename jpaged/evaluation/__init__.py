"""Model class for EleutherAI's lm-evaluation-harness: `lm_eval --model jpaged`. An optional part.

harness.py     model class of the harness; the only file that imports it
__main__.py    the harness's command line, with the model registered
runner.py      pairs of tokens -> log-probabilities, contexts -> texts: the harness's semantics, without the harness;
               options, sampling and tokenization of tasks
backends.py    engines for the runner: one in this process, or a server; groups pairs by context
"""
