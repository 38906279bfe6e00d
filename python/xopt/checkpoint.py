"""`save` and `load`: a directory with the logical weights in safetensors and a manifest of how they were optimized.

Nothing of a machine's packed layout is written, so a directory can be loaded by any CPU and any later version, and its
weights by whoever reads safetensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from xopt._C import __version__
from xopt.api import optimize
from xopt.config import Config
from xopt.report import ATTRIBUTE, report

Model = TypeVar("Model", bound=nn.Module)

_FORMAT = 1
_MANIFEST = "xopt.json"
_WEIGHTS = "model.safetensors"


class CheckpointError(RuntimeError):
    """A directory that `load` cannot take. Nothing was loaded."""


def save(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Writes an optimized model, from which `load` makes it again."""
    from safetensors.torch import save_file

    made_by = report(model)
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    same: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"save: model: state_dict()[{name!r}] is a {type(tensor).__name__}, no tensor")
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and place in first:
            same[name] = first[place]  # tied: written once
            continue
        first[place] = name
        # A copy where others share its memory, which safetensors refuses.
        tensors[name] = tensor.contiguous().clone()
    save_file(tensors, str(folder / _WEIGHTS))
    manifest = {
        "format": _FORMAT,
        "xopt": __version__,
        "class": type(model).__name__,
        "dtype": made_by.dtype,
        "level": made_by.level,
        "config": vars(made_by.config),
        "tied": same,
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2))


def load(directory: str | os.PathLike[str], model: Model | Callable[[], Model]) -> Model:
    """The model of a directory that `save` wrote. `model` is an unoptimized instance, which is changed, or a class or
    function that makes one."""
    manifest, tensors = _read(Path(directory))
    with torch.inference_mode(False), torch.no_grad():  # in inference mode, nobody would count changes of its tensors
        instance: Any = model if isinstance(model, nn.Module) else model()
    if type(instance).__name__ != manifest["class"]:
        raise CheckpointError(f"load: model: expected a {manifest['class']}, got a {type(instance).__name__}")
    if ATTRIBUTE in instance.__dict__:
        raise CheckpointError("load: model: expected one that is not optimized yet")
    expected = {name: value.shape for name, value in instance.state_dict().items()}
    found = {name: value.shape for name, value in tensors.items()}
    if expected != found:
        wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        raise CheckpointError(f"load: {directory}: does not fit the model in {len(wrong)} tensors, first {wrong[0]!r}")
    instance.load_state_dict(tensors)
    dtype = None if manifest["dtype"] == "source dtype" else getattr(torch, manifest["dtype"])
    instance.eval()
    loaded: Model = optimize(
        instance, dtype, inplace=True, level=manifest["level"], config=Config(**manifest["config"])
    )
    return loaded


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        manifest: Any = json.loads((folder / _MANIFEST).read_text())
        if not isinstance(manifest, dict):
            raise TypeError("the manifest is no JSON object")
        if manifest["format"] != _FORMAT:
            raise CheckpointError(f"load: {folder}: format {manifest['format']!r}; this version reads {_FORMAT}")
        for key, kind in {"class": str, "dtype": str, "level": str, "config": dict, "tied": dict}.items():
            if not isinstance(manifest[key], kind):
                raise TypeError(f"{key} is no {kind.__name__}")
        tensors = load_file(str(folder / _WEIGHTS))
        tensors |= {name: tensors[source] for name, source in manifest["tied"].items()}
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"load: {folder}: no xopt checkpoint: {type(error).__name__}: {error}") from error
    return manifest, tensors
