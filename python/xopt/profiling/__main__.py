"""`python -m xopt.profiling`: the same as `xopt-profile`."""

import sys

from xopt.profiling.cli import main

if __name__ == "__main__":
    sys.exit(main())
