"""A draft model or a head on the device: it proposes tokens, and the model verifies them in the same dispatch.

draft.py     the draft model, or the head, beside the model: what it has to be, and its sizes
packing.py   what a dispatch takes in one buffer, and what it gives
rounds.py    speculate[R]: rounds of proposals and their verification
dispatch.py  the rows of a dispatch, and what who proposes for them does
by_model.py  proposals of a draft model
by_head.py   proposals of a head
following.py draft[T] of a head: it runs behind each forward of the model
keys.py      draft[T]: the draft model over tokens that it has not seen, for their keys
lowered.py   how the programs are lowered
drafter.py   the draft's parameters and pool, and the calls
"""
