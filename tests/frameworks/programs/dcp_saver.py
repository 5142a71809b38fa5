"""torch.distributed.checkpoint: dcp_saver.py DIRECTORY RANK STEP...; RANK of two, rendezvous from the environment.

Saves a state of each STEP into the same directory; without a STEP loads it. Prints the step that was loaded.
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

directory, rank, *steps = sys.argv[1:]
torch.set_num_threads(1)
dist.init_process_group("gloo", rank=int(rank), world_size=2)


def state(step):
    generator = torch.Generator().manual_seed(step * 2 + int(rank))
    return {
        f"shard{rank}": torch.randn(300, 1000, generator=generator),
        "step": torch.tensor(step),
        "optimizer": {"lr": 0.1, f"moment{rank}": torch.full((50_000,), float(step))},
    }


for step in steps:
    dcp.save(state(int(step)), checkpoint_id=directory)
if not steps:
    found = state(0)
    dcp.load(found, checkpoint_id=directory)
    step = int(found["step"])
    expected = state(step)
    assert torch.equal(found[f"shard{rank}"], expected[f"shard{rank}"])
    assert torch.equal(found["optimizer"][f"moment{rank}"], expected["optimizer"][f"moment{rank}"])
    print("loaded", step)
dist.destroy_process_group()
