"""`python -m xopt.launch`. Python loads xopt, and with it torch, before it comes here; `xopt-launch` does not."""

import sys

from xopt.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
