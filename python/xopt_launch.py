"""`xopt-launch`: the launcher of xopt, at once.

xopt imports torch, which takes seconds. The launcher needs neither, and this process needs nothing else of xopt: so
the package is entered here without being run. `python -m xopt_launch` does the same.
"""

import importlib
import importlib.util
import sys


def main() -> int:
    if "xopt" not in sys.modules:
        spec = importlib.util.find_spec("xopt")
        assert spec is not None, "xopt is installed beside this file"
        sys.modules["xopt"] = importlib.util.module_from_spec(spec)
    status: int = importlib.import_module("xopt.launch.cli").main()
    return status


if __name__ == "__main__":
    sys.exit(main())
