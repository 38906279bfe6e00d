"""Autotuning: which of the choices of a kernel is the fastest for a shape, found by trying and kept on disk.

The trying itself stands in csrc/runtime/tuner.h. `scope.py` says whose calls are tuned, `store.py` keeps what was
found, `tuned.py` says it in words.
"""

from xopt.tuning.scope import ModelTuning, forced, of_model, start
from xopt.tuning.store import Entry, Store, open_store, use_file
from xopt.tuning.tuned import Tuned, known

__all__ = ["Entry", "ModelTuning", "Store", "Tuned", "forced", "known", "of_model", "open_store", "start", "use_file"]
