"""The embedded model: the grammar it learnt from, its training, and its checkpoint."""
