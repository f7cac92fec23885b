"""The same loss on any TP × DP mesh: run it with several degrees, and compare the bits that it prints.

torchrun --nproc-per-node 1 examples/torchrun_mesh.py
torchrun --nproc-per-node 4 examples/torchrun_mesh.py --tp 2
torchrun --nproc-per-node 6 examples/torchrun_mesh.py --tp 3
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import rl_engine

SEQUENCES, TOKENS, VOCAB = 12, 20, 1536


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tp", type=int, default=1)
    tp = parser.parse_args().tp
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))

    # Every rank makes the whole batch and keeps its part; a trainer has only that part to begin with.
    random = np.random.RandomState(0)
    logits = torch.from_numpy(
        random.standard_normal((SEQUENCES, TOKENS, VOCAB)).astype(np.float32)
    ).bfloat16()
    targets = torch.from_numpy(random.randint(0, VOCAB, (SEQUENCES, TOKENS)))
    old_logps = torch.full((SEQUENCES, TOKENS), -7.5)
    rewards = torch.from_numpy(random.randint(0, 4, SEQUENCES)).float()
    mask = torch.from_numpy(random.randint(0, 4, (SEQUENCES, TOKENS)) > 0)
    group_ids = torch.arange(SEQUENCES) // 4

    rows = slice(*(SEQUENCES * (mesh.get_local_rank("dp") + end) // mesh["dp"].size() for end in (0, 1)))
    columns = slice(*(VOCAB * (mesh.get_local_rank("tp") + end) // tp for end in (0, 1)))
    local_logits = logits[rows, :, columns].clone().requires_grad_()

    result = rl_engine.grpo_loss(
        local_logits,
        targets[rows],
        old_logps[rows],
        rewards[rows],
        mask=mask[rows],
        group_ids=group_ids[rows],
        tp_group=mesh.get_group("tp"),
        dp_group=mesh.get_group("dp"),
    )
    result.loss.backward()

    if dist.get_rank() == 0:
        bits = result.loss.detach().view(torch.int32).item() & 0xFFFFFFFF
        gradient = local_logits.grad[local_logits.grad != 0][:2].tolist()
        print(
            f"dp {mesh['dp'].size()} × tp {tp}: loss {result.loss.item():.9g} (0x{bits:08x}), "
            f"gradient {gradient} …"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
