"""Shards of real DTensors on four ranks: which elements they are, and that init and load fill them."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from partita.facts.model import Model
from partita.model import hf, shards
from partita.model.decoder import Decoder, plain
from partita.model.init import fill, initial
from partita.model.loss import vocabulary_loss

MODEL = Model("tiny", "llama", layers=2, hidden=20, ffn=28, heads=4, kv_heads=2, head_dim=6, vocab=37, tied=False)
DIVIDED = {"q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(), "o": RowwiseParallel()}


def test_held_without_a_mesh():
    assert shards.held((5, 3), (), (), ()) == shards.box((0, 5), (0, 3))
    # Nested: 11 rows over 2 (6 + 5), the second part over 4 (2 + 2 + 1 + 0).
    parts = [shards.held((11, 3), (2, 4), (1, i), (Shard(0), Shard(0)))[0] for i in range(4)]
    assert parts == [((6, 8),), ((8, 10),), ((10, 11),), ()]
    assert shards.held((4, 7), (2, 3), (1, 2), (Shard(0), Shard(1))) == shards.box((2, 4), (6, 7))
    with pytest.raises(ValueError, match="only shards and replicas"):
        shards.held((4,), (2,), (0,), (Partial(),))


def _placed(rank, world):
    """Every pair of placements on a 2 x 2 mesh, uneven shapes: the local tensor is the box that `held` says."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    checked = 0
    for shape in ((7, 5), (3, 2), (1, 6)):
        whole = torch.arange(shape[0] * shape[1]).view(shape)
        for placements in itertools.product((Replicate(), Shard(0), Shard(1)), repeat=2):
            tensor = distribute_tensor(whole, mesh, placements)
            mine, held = shards.local(tensor)
            index = [torch.tensor([i for a, b in runs for i in range(a, b)], dtype=torch.int64) for runs in held]
            want = whole[index[0]][:, index[1]]
            assert mine.numel() == want.numel() and torch.equal(mine, want if want.numel() else mine), placements
            checked += 1
    return checked


def test_boxes_are_what_dtensor_stores(ranks):
    assert ranks(4).run(_placed) == [27] * 4


def _divided(shape):
    """A meta decoder divided by tensor parallel (attention only) and FSDP2, materialised but not filled."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        decoder = Decoder(MODEL)
    for block in decoder.blocks:
        if shape[1] > 1:
            parallelize_module(block.attn, mesh["tp"], DIVIDED, src_data_rank=None)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(decoder, mesh=mesh["dp"])
    decoder.to_empty(device="cpu")
    return decoder


def _filled(rank, world, shape, folder):
    decoder = _divided(shape)
    strided = 0
    for source in ("init", "load"):
        if source == "init":
            fill(decoder.named_parameters(), MODEL, seed=9)
        else:
            for p in decoder.parameters():
                p.detach().to_local().fill_(-1)
            hf.load(decoder.named_parameters(), MODEL, folder)
        for p in MODEL.parameters:
            tensor = decoder.get_parameter(p.name)
            assert isinstance(tensor, DTensor)
            strided += any(hasattr(x, "split_factor") for x in tensor.placements)
            assert torch.equal(tensor.full_tensor().detach(), initial(p.name, p, 9, MODEL.layers)), (source, p.name)
    return strided


@pytest.mark.parametrize("shape, strided", [((4, 1), 0), ((2, 2), 2 * 3 * MODEL.layers)])
def test_init_and_load_fill_local_shards(ranks, tmp_path, shape, strided):
    hf.save({p.name: initial(p.name, p, 9, MODEL.layers) for p in MODEL.parameters}, MODEL, tmp_path / "m")
    assert ranks(4).run(_filled, shape, str(tmp_path / "m")) == [strided] * 4


def _trained(rank, world, way):
    """Largest relative difference of a gradient from one device; every rank has its own row of the batch."""
    torch.manual_seed(0)
    ids = torch.randint(0, MODEL.vocab, (world, 9))
    alone = Decoder(MODEL).double()
    fill(alone.named_parameters(), MODEL, 0)
    vocabulary_loss(alone(ids, torch.arange(9), plain(MODEL)), ids).backward()

    decoder = Decoder(MODEL).double()
    if way == "ddp":
        fill(decoder.named_parameters(), MODEL, 0)
        run = torch.nn.parallel.DistributedDataParallel(decoder)
    else:
        for part in (*decoder.blocks, decoder):
            fully_shard(part, mesh=init_device_mesh("cpu", (world,)))
        fill(decoder.named_parameters(), MODEL, 0)
        run = decoder
    mine = ids[rank : rank + 1]
    vocabulary_loss(run(mine, torch.arange(9), plain(MODEL)), mine).backward()
    worst = 0.0
    for a, b in zip(alone.parameters(), decoder.parameters(), strict=True):
        got = b.grad.full_tensor() if isinstance(b.grad, DTensor) else b.grad
        worst = max(worst, ((got * world - a.grad).norm() / a.grad.norm()).item())
    dist.barrier()
    return worst


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_loss_and_decoder_under_ddp_and_fsdp(ranks, way):
    assert max(ranks(2).run(_trained, way)) < 1e-12
