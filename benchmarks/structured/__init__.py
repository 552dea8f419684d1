"""Which grammar library: how long compiles and masks take, and what of JSON Schema each gets right.

__main__.py     python -m benchmarks.structured
libraries.py    llguidance and xgrammar behind the same few verbs
vocabularies.py the packaged model's tokens, and 128,000 made of them
timing.py       compiles and masks of what people ask for
suite.py        the public JSON-Schema-Test-Suite, a process a group
throughput.py   python -m benchmarks.structured.throughput: a batch with schemas, and the same without
jumps.py        python -m benchmarks.structured.jumps: when jumps pay
phases.py       which of the engine's phases take the time
page.py         docs/structured.md
"""
