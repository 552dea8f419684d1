"""Policies of eviction against each other and against hindsight, on traces, over the engine in simulated time.

traces.py     what arrives: chats, agents, batch evaluation, random prompts, all of them
serving.py    serves a trace by one policy
hindsight.py  who knows what comes, and the most that anybody could have saved
decisions.py  what a decision takes
device.py     what blocks cost on the device that is here
rows.py       what was measured, as rows; their spread over seeds, and the table of docs/performance.md
plots.py      the picture
"""
