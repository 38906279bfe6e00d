"""python -m tests: runs given cases, or random ones of some or all families. See families.py."""

from __future__ import annotations

import argparse
import json
import sys

from tests.families import CaseFailure, active_level, all_families, find_family, kernel_calls, run_line


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests", description=__doc__)
    parser.add_argument("names", nargs="*", help="lines of cases, or names of families (none: all)")
    parser.add_argument("--count", type=int, default=200, help="random cases of each family")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print level, counts and kernel calls as JSON")
    options = parser.parse_args(arguments)
    lines = [name for name in options.names if ":" in name]
    names = [name for name in options.names if ":" not in name]
    families = [find_family(name) for name in names] if options.names else all_families()
    counts: dict[str, int] = {}
    failures: list[str] = []
    for line in lines:
        try:
            run_line(line)
        except CaseFailure as failure:
            failures.append(str(failure))
    for family in families:
        try:
            counts[family.name] = family.run_all(family.cases(options.seed, options.count))
        except CaseFailure as failure:
            failures.append(str(failure))
    if options.json:
        print(json.dumps({"level": active_level(), "counts": counts, "calls": kernel_calls(), "failures": failures}))
    else:
        print("\n\n".join([*failures, f"level {active_level()}: {len(lines)} given, {counts}"]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
