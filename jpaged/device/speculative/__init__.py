"""Draft models and EAGLE-3 heads on the device: they propose tokens, and the model verifies them in the same dispatch.

dispatch.py     the rows of a dispatch, its inputs in one buffer, and the interface of a proposer
drafter.py      the draft model or head next to the model: requirements, sizes, parameters, pool, calls
eagle.py        proposals of a head, and draft[T], its run after each forward of the model
draft_model.py  proposals of a draft model, and draft[T], which computes its keys of tokens that it has not seen
step.py         speculate[R]: rounds of proposals and their verification; the lowering of all programs
"""
