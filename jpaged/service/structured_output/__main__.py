"""Trial of grammars: `python -m jpaged.service.structured_output`, the child of `trial_process`.

Its stdin is a socket.
"""

import sys

from jpaged.service.structured_output.sandbox import main

if __name__ == "__main__":
    sys.exit(main())
