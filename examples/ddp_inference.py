"""Inference by several processes, each with its share of the batch, on its share of the cores.

xopt-launch --nproc-per-node 2 examples/ddp_inference.py

Without the launcher, it runs as the one process that it then is.
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import xopt


def main() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same model and batch everywhere
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).eval()
    batch = torch.randn(64, 256)
    optimized = xopt.optimize(model, dtype=torch.bfloat16)

    with torch.inference_mode():
        own = optimized(batch.tensor_split(world)[rank]).contiguous()
        parts = [torch.empty_like(share) for share in batch.tensor_split(world)]
        dist.all_gather(parts, own)
        result, expected = torch.cat(parts), model(batch)
    error = float((result - expected).norm() / expected.norm())
    cores = os.environ.get("XOPT_LAUNCH_CPUS", "of the system's choice")
    said = [""] * world
    dist.all_gather_object(said, f"rank {rank}: {len(own)} rows on CPUs {cores}, {torch.get_num_threads()} threads")
    if rank == 0:
        print("\n".join([*said, f"relative error of the joined result: {error:.2g}"]))
    assert error < 0.02
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
