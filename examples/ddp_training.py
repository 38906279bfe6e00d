"""Training by several processes with DistributedDataParallel, then inference with what was trained, optimized.

xopt-launch --nproc-per-node 2 examples/ddp_training.py

Without the launcher, it runs as the one process that it then is.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import xopt


def main() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(parallel.parameters(), lr=5e-2)
    points = torch.rand(512, 16)
    values = points.square().sum(1, keepdim=True)
    own_points, own_values = points.tensor_split(world)[rank], values.tensor_split(world)[rank]
    for _ in range(120):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(parallel(own_points), own_values)
        loss.backward()  # gradients are averaged over the processes here
        optimizer.step()

    optimized = xopt.optimize(model.eval(), dtype=torch.bfloat16)
    with torch.inference_mode():
        checksum = sum(parameter.double().sum() for parameter in model.parameters())
        checksums = [torch.empty_like(checksum) for _ in range(world)]
        dist.all_gather(checksums, checksum)
        trained = float(nn.functional.mse_loss(optimized(points), values))
    assert all(torch.equal(other, checksum) for other in checksums), "the processes have trained different models"
    if rank == 0:
        print(
            f"{world} processes; loss of the optimized model {trained:.2g}, variance of the values {values.var():.2g}"
        )
    assert trained < 0.2 * float(values.var())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
