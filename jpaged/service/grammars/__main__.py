"""Trial of grammars: `python -m jpaged.service.grammars`, the child of `trial_process`, with a socket as its stdin."""

import sys

from jpaged.service.grammars.sandbox import main

if __name__ == "__main__":
    sys.exit(main())
