"""Where a model's time goes, kernel by kernel, against this machine's limits. A leaf: nothing in the package uses it.

`xopt.profile(model, *inputs)` and `with xopt.profiler() as prof:`; `xopt-profile script.py` for whole scripts.
"""

from xopt.profiling.result import Profile
from xopt.profiling.session import profile, profiler

__all__ = ["Profile", "profile", "profiler"]
