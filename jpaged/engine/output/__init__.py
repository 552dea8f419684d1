"""What a step sampled -> what callers see.

processor.py   sampled tokens -> events; one of a request's events is its last
text.py        tokens -> text and stops of one sequence
beam.py        the rules of beam search on plain lists
beam_rows.py   a beam search's step on real sequences
"""
