"""The modules that `optimize` puts in the place of a model's own. Each file holds one kind and is found by itself.

A file defines one or more subclasses of `base.Replacement`, which say what they can replace and compute it.
"""

import gc
import importlib
import pkgutil

# Torch leaves so many objects behind that a full collection takes 0.1 s, and these files would set off one or two: a
# quarter of what the import takes.
_collects = gc.isenabled()
gc.disable()
try:
    for _file in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{_file.name}")
finally:
    if _collects:
        gc.enable()
