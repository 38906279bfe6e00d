"""`xopt-launch`: starts instances of a script, each on cores, memory and settings of its own.

    xopt-launch --ninstances 4 script.py --its-arguments

The launcher itself (`cli`) loads neither torch nor the rest of xopt, so that it starts at once; `xopt-launch --help`
says what it does. A script tells it how fast it was by `xopt.launch.report`.
"""

from xopt.launch.measure import report

__all__ = ["report"]
