"""`xopt-launch`: the launcher of xopt, at once.

xopt imports torch, which takes seconds. The launcher needs neither, and this process needs nothing else of xopt: so
the package is entered here without being run. `python -m xopt_launch` does the same.
"""

import importlib
import importlib.util
import sys


def enter_package() -> None:
    """Makes `xopt.launch` importable without an import of xopt itself, unless that has been imported."""
    if "xopt" not in sys.modules:
        spec = importlib.util.find_spec("xopt")
        assert spec is not None, "xopt is installed beside this file"
        sys.modules["xopt"] = importlib.util.module_from_spec(spec)


def main() -> int:
    enter_package()
    status: int = importlib.import_module("xopt.launch.cli").main()
    return status


if __name__ == "__main__":
    sys.exit(main())
