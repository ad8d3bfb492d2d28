"""A training script as anybody writes it: FSDP2 with gradient clipping, its own model and loop. Nothing of Partita.

partita record -- torchrun --standalone --nproc-per-node 2 examples/third_party_fsdp2.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

VOCAB, WIDTH, DEPTH = 101, 32, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), *[Block() for _ in range(DEPTH)], nn.Linear(WIDTH, VOCAB))
    for block in model[1:-1]:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(rank)
    for step in range(5):
        ids = torch.randint(0, VOCAB, (4, 17), generator=data)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        shown = norm.full_tensor().item()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f} norm {shown:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
