"""One model over several processes: each holds a part of every weight, and the parts are optimized layers.

xopt-launch --nproc-per-node 2 examples/tensor_parallel.py

The weights are dealt out by torch.distributed.tensor.parallel, in two styles of our own, after which each process has
an ordinary, smaller model that xopt optimizes as any other. Without the launcher, there is one part.
"""

import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn import functional

import xopt


class Block(nn.Module):
    """Attention and an MLP. How many heads there are here follows from the width of what the projections answer."""

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.depth = features // heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(features), nn.LayerNorm(features)
        self.query, self.key, self.value, self.out = (nn.Linear(features, features) for _ in range(4))
        self.up, self.down = nn.Linear(features, 4 * features), nn.Linear(4 * features, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm_attention(x)
        query, key, value = (
            layer(y).unflatten(-1, (-1, self.depth)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm_mlp(x))))


def part_of(tensor: torch.Tensor, mesh: DeviceMesh, dimension: int) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(tensor.detach(), mesh, [Shard(dimension)]).to_local())


class DealtOutputs(ParallelStyle):
    """Each process computes a part of a layer's outputs, from all inputs."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Linear)
        module.weight, module.bias = part_of(module.weight, device_mesh, 0), part_of(module.bias, device_mesh, 0)
        module.out_features = len(module.weight)
        return module


class DealtInputs(ParallelStyle):
    """Each process has a part of a layer's inputs; the outputs are sums over the processes."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Linear)
        module.weight = part_of(module.weight, device_mesh, 1)
        module.in_features = module.weight.shape[1]
        if device_mesh.get_rank() != 0:
            module.bias = None  # it is to be added once

        def add_up(_: nn.Module, __: object, result: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(result, group=device_mesh.get_group())
            return result

        module.register_forward_hook(add_up)
        return module


def compare_with_whole() -> None:
    """Deals blocks out among the processes, and compares what they compute with blocks that one has for itself."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)  # the same weights and inputs everywhere
    whole = nn.Sequential(*(Block(256, 8) for _ in range(2))).eval()
    x = torch.randn(2, 32, 256)
    with torch.inference_mode():
        expected = whole(x)

    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        part = nn.Sequential(*(Block(256, 8) for _ in range(2))).eval()
        part.load_state_dict(whole.state_dict())
        dealt, summed = DealtOutputs(), DealtInputs()
        plan = {f"*.{name}": dealt for name in ("query", "key", "value", "up")} | {"*.out": summed, "*.down": summed}
        parallelize_module(part, mesh, plan)
        part = xopt.optimize(part, dtype=dtype)
        with torch.inference_mode():
            result = part(x)
        error = float((result - expected).norm() / expected.norm())
        layers = [entry for entry in xopt.report(part).entries if entry.detail.startswith("packed")]
        if dist.get_rank() == 0:
            print(
                f"{dtype}: {world} processes, each with {len(layers)} optimized layers of "
                f"{sum(layer.weights for layer in layers):,} weights; relative error {error:.2g}"
            )
        assert len(layers) == 12
        assert error < tolerance


def main() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    compare_with_whole()
    gc.collect()  # the mesh stays in cycles, and a group that it holds when Python ends may abort the process
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
