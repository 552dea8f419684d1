"""How tokens are proposed ahead, as the command line says it; values alone, which every room may read.

options.py  `--speculative-config`: the method, and what it is told
"""

from jpaged.speculative.options import SpeculativeOptions

__all__ = ["SpeculativeOptions"]
