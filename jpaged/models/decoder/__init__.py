"""The decoder that most families use: norms, attention, a feed-forward and two sums, as configured.

config.py         its shape: all options of a family; a model that drops old tokens from the cache
modules.py        one layer with a feed-forward or experts, and the modules around the layers
recurrent.py      recurrent layers, and attention with gates
shared_kv.py      layers that attend to the keys of earlier layers, and inputs of each layer
leaves.py         the leaves of the parameters, under the names in a family's checkpoints
config_fields.py  fields of config.json that families share
"""

from jpaged.models.decoder.config import DecoderConfig
from jpaged.models.decoder.leaves import Names, decoder_family

__all__ = ["DecoderConfig", "Names", "decoder_family"]
