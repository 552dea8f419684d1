"""What a step sampled -> what callers see.

processor.py   sampled tokens -> text, stops and events; one event of a request is its last
told.py        what was told besides tokens
text.py        tokens -> text, each character once and whole
beam.py        the rules of beam search on plain lists
beam_rows.py   a beam search's step on real sequences
"""
