"""Measurements: `python -m xopt.bench`. A leaf: nothing in the package uses it."""
