"""lm-evaluation-harness over jpaged and over its own `hf`: the same numbers, and how long each takes.

__main__.py  the comparison, and the measurement
worker.py    one model in one process
lossy.py     perplexity of the demo model that forgets old tokens
stories.py   the texts of the tasks
tasks/       what the harness reads
"""
