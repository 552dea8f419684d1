"""The decoder that most families are: norms, attention, a feed-forward and two sums, of which a config says which.

config.py   its shape: all that a family may choose
lossy.py    the same of a model that forgets old tokens
reading.py  what families read of a config.json in the same words
modules.py  one layer, and what is around the layers
leaves.py   the leaves of its parameters, under the names that a family's checkpoints have for them
"""

from jpaged.models.decoder.config import DecoderConfig
from jpaged.models.decoder.leaves import Names, decoder_family

__all__ = ["DecoderConfig", "Names", "decoder_family"]
