"""The modules that `optimize` puts in the place of a model's own. Each file holds one kind and is found by itself.

A file defines one or more subclasses of `base.Replacement`, which say what they can replace and compute it.
"""

import importlib
import pkgutil

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")
