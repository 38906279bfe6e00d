"""`python -m xopt.bench`."""

import sys

from xopt.bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
