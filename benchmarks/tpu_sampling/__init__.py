"""How many cycles sampling takes on TPUs; nothing runs on one.

__main__.py  the table and what is recorded: `make aot && python -m benchmarks.tpu_sampling`
count.py     the cycles of a program
"""
