"""`tune`: products, convolutions and attention of a model by the instances that are fastest for their shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from xopt.modules.root import make_tuned, tuning_of
from xopt.report import Report, report

_MOST_FORWARDS = 3


def tune(model: nn.Module, *inputs: Any, **named: Any) -> Report:
    """Runs `model(*inputs, **named)` and tries, for each shape that it meets and that is not known yet, the instances
    and blockings that its kernel has; the report says which ones run from now on.

    The model was made by `xopt.optimize`. What is found is kept on disk (`python -m xopt cache`), so that the call is
    quick in later processes. Nothing is used where it is not clearly faster than what the kernels' own heuristics
    choose. `Config(autotune="max")` does the same for each new shape without a call of this.
    """
    report(model)  # an error for what `optimize` has not made
    before = tuning_of(model)
    after = "use" if before is None else before.mode
    tuning = make_tuned(model, "use")
    try:
        with torch.inference_mode():
            model(*inputs, **named)  # fuses blocks that were not called yet: what they do apart is not wanted again
            tuning.mode = "max"
            for _ in range(_MOST_FORWARDS):
                known = len(tuning.used)
                model(*inputs, **named)
                if known and len(tuning.used) == known:
                    break
    finally:
        tuning.mode = after
    return report(model)
