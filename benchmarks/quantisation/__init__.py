"""What fewer bits cost: perplexity and logits of the packaged model, beside transformers and the weights that they
stand for.

__main__.py     python -m benchmarks.quantisation
activations.py  python -m benchmarks.quantisation.activations: int8 activations next to exact ones
measure.py      perplexity and logits of one set of parameters over held text
theirs.py       transformers with the weights that they stand for
"""
