"""The models of the bench: made from configurations with random weights, so that nothing is downloaded."""

from __future__ import annotations

from xopt.bench import language_models, vision_models

CASES = {case.name: case for case in (*language_models.CASES, *vision_models.CASES)}
