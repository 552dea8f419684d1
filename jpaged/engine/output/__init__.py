"""Output of sampled tokens to clients.

processor.py   sampled tokens -> text, stops and events; exactly one event of a request is its last
beam.py        beam search on plain lists
"""
