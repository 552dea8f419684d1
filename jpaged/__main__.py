"""`python -m jpaged` is `jpaged`."""

import sys

from jpaged.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
