"""Draft models and EAGLE-3 heads on the device: they propose tokens, and the model verifies them in the same dispatch.

draft.py     the draft model or head next to the model: its requirements and sizes
packing.py   inputs of a dispatch in one buffer, and its outputs
rounds.py    speculate[R]: rounds of proposals and their verification
dispatch.py  the rows of a dispatch, and the interface of a proposer
by_model.py  proposals of a draft model
by_head.py   proposals of a head
following.py draft[T] of a head: it runs after each forward of the model
keys.py      draft[T] of a draft model: computes its keys of tokens that it has not seen
lowered.py   how the programs are lowered
drafter.py   the draft's parameters and pool, and the calls
"""
