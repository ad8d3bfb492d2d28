"""Fully sharded data parallel: every parameter, its gradient and its optimizer state lie in shards over the data ranks.

What it does.  Outside its moment of use a parameter is 1/r on each of r ranks.  ``full_shard`` drops a gathered block
after its forward and gathers it again for backward; ``shard_grad_op`` keeps it until backward is done.

How.  Torch's ``fully_shard``: each block is a unit, and what is left (embedding, final norm, head) is the root unit.
``shard=`` smaller than the data ranks makes copies of the shards (hybrid sharding).

What it communicates.  A unit's parameters are all-gathered before use and its gradients reduce-scattered to their
owners: three times (r-1)/r of the parameters a step under full_shard, where DDP sends twice (Rajbhandari et al. 2020,
"ZeRO", section 7.2.2).  The root unit keeps its gather by default, so it costs two.  Accumulation repeats gathers,
not reductions.

When it wins.  Model state does not fit on one device, and a block's compute lasts longer than the gather of the next.

What limits it.  Small blocks or slow links leave the gathers exposed; accumulation without synchronisation holds
unsharded gradients; the gathered root unit is large where the vocabulary is.

To keep: memory falls with ranks, and the price is half as much traffic again.
"""
