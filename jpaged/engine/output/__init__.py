"""Output of sampled tokens to clients.

processor.py   sampled tokens -> text, stops and events; exactly one event of a request is its last
told.py        aux outputs: prompt log-probabilities, embeddings, log-probabilities of samples
text.py        incremental detokenization
beam.py        beam search on plain lists
beam_rows.py   a beam search step on sequences
"""
