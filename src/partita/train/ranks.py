"""What a rank needs around its work: who it is, its device, and a process group that always ends."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from partita.facts.errors import BadInput
from partita.train.launch import SOCKET_VARIABLE

LEAVE_S = 2.0
"""How long a rank that failed waits for its process group to end before it says why it failed."""


@dataclass(frozen=True)
class Rank:
    """This process among ``world`` ranks; ``local`` counts on this machine."""

    rank: int
    world: int
    local: int

    @property
    def first(self) -> bool:
        return self.rank == 0


def rank() -> Rank:
    """From torchrun's variables; alone where there are none."""
    number = {name: int(os.environ.get(name, default)) for name, default in _DEFAULTS.items()}
    return Rank(number["RANK"], number["WORLD_SIZE"], number["LOCAL_RANK"])


_DEFAULTS = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


def device_of(kind: str, local: int = 0) -> torch.device:
    """``cpu``, or the CUDA device of this rank; raises BadInput where there are too few."""
    if kind != "cuda":
        return torch.device(kind)
    if local >= torch.cuda.device_count():
        raise BadInput(
            f"rank {local} of this machine needs a CUDA device of its own and there are {torch.cuda.device_count()}; "
            "fewer ranks, or --device cpu, would work"
        )
    return torch.device("cuda", local)


@contextmanager
def process_group(device: torch.device | str = "cpu", timeout_s: float = 1800.0) -> Iterator[Rank]:
    """The process group of all ranks (gloo on CPUs, NCCL on CUDA), destroyed on every way out; none for one rank."""
    me, where = rank(), torch.device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    if me.world == 1:
        yield me
        return
    backend = "nccl" if where.type == "cuda" else "gloo"
    limit = timedelta(seconds=timeout_s)
    store = _store(me, limit)
    bound = {"device_id": where} if backend == "nccl" else {}
    if store is None:
        dist.init_process_group(backend, timeout=limit, **bound)  # type: ignore[arg-type]
    else:
        dist.init_process_group(backend, store=store, rank=me.rank, world_size=me.world, timeout=limit, **bound)  # type: ignore[arg-type]
    try:
        yield me
        dist.barrier()  # nobody leaves, and takes the store away, while a peer is still in a collective
    except BaseException as error:
        error.partita_at_s = time.monotonic()  # type: ignore[attr-defined]
        # Ending a group may wait for peers that will never come; the error must be told all the same.
        ending = threading.Thread(target=dist.destroy_process_group, daemon=True)
        ending.start()
        ending.join(LEAVE_S if backend == "nccl" else LEAVE_S / 2)
        raise
    else:
        dist.destroy_process_group()


def _store(me: Rank, limit: timedelta) -> dist.Store | None:
    """The rendezvous of ``launch``: rank 0 serves it on the socket that the launcher bound.  None inside torchrun."""
    handle = os.environ.get(SOCKET_VARIABLE)
    if handle is None:
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if me.first:
        return dist.TCPStore(host, port, me.world, True, limit, wait_for_workers=False, master_listen_fd=int(handle))
    return dist.TCPStore(host, port, me.world, False, limit, wait_for_workers=False)
