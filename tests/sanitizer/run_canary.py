"""Proves that the sanitizers see errors inside libxopt_core.so: each canary has to end its process with a report.

Run by `make sanitize`, in the environment of the sanitized tests.
"""

import ctypes
import subprocess
import sys
from pathlib import Path

# function, harmless argument, harmful argument, what the report says
CANARIES = [
    ("xopt_canary_heap_overflow", 0, 4, "AddressSanitizer: heap-buffer-overflow"),
    ("xopt_canary_signed_overflow", 0, 1, "signed integer overflow"),
]


def call(function: str, argument: int) -> None:
    import torch  # noqa: F401  (brings the OpenMP runtime that the library needs)

    import xopt

    library = ctypes.CDLL(str(Path(xopt.__file__).parent / "libxopt_core.so"))
    getattr(library, function)(ctypes.c_int(argument))


def run(function: str, argument: int) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, __file__, function, str(argument)], capture_output=True, text=True)


def main() -> int:
    for function, harmless, harmful, report in CANARIES:
        quiet, loud = run(function, harmless), run(function, harmful)
        if quiet.returncode != 0:
            print(f"error: {function}({harmless}) should be harmless:\n{quiet.stderr}", file=sys.stderr)
            return 1
        if loud.returncode == 0 or report not in loud.stderr:
            print(f"error: the sanitizer did not see {function}({harmful}):\n{loud.stderr}", file=sys.stderr)
            return 1
        print(f"canary: {function}({harmful}) -> {report}")
    return 0


if __name__ == "__main__":
    if len(sys.argv) > 1:
        call(sys.argv[1], int(sys.argv[2]))
    else:
        sys.exit(main())
