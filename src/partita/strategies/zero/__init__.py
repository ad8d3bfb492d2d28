"""Sharded optimizer: every rank holds the whole model, and updates its own part of it (ZeRO stages 1 and 2).

What it does.  Optimizer state and the float32 master lie in shards over the data ranks; under ``zero2`` gradients too.
Each rank updates its shard of the parameters and gives it to the others.

How.  Parameters are views into flat buckets, each padded once to a multiple of the ranks.  As backward fills a bucket
of gradients, it is summed to its owners (reduce-scatter), in one fixed order on every rank: a bucket that is ready
waits for those before it.  After the optimizer has stepped, each bucket of parameters is all-gathered, and the next
forward waits for it where it first uses it.

What it communicates.  Gradients reduce-scattered and parameters all-gathered: (r-1)/r of the bytes each, together what
an all-reduce sends (Rajbhandari et al. 2020, "ZeRO", section 7.2.1).  ``zero_sync=all_reduce`` sums whole gradients
everywhere and sends half as much again.  Accumulation: ``zero1`` reduces once a step; ``zero2`` reduces every
micro-batch, because to keep what is not yet reduced would be to keep whole gradients.

When it wins.  Optimizer state is what does not fit (12 of 16 bytes per parameter with a float32 master), and the
parameters do.

What limits it.  Parameters are whole on every rank; ``zero2`` with many micro-batches multiplies the traffic of
gradients; the gather of the bucket that forward needs first cannot hide.

To keep: who updates a parameter needs its state, everybody else only the result.
"""
