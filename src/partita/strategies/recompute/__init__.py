"""Recomputation: what forward saved is made again in backward instead of being kept.

What it does.  Divides nothing.  Of chosen blocks only some tensors are kept from forward to backward; the block's
forward runs once more, just before its backward, to make the others.

How.  ``full`` keeps a block's input (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost").  ``selective``
makes only the attention core again (Korthikanti et al. 2022, section 5).  ``ops`` decides by operation: it keeps the
output of every second matrix product, of attention and of collectives, and makes the rest again.  Each may name blocks:
``recompute=full:0-15,20``.

What it communicates.  Nothing of its own; collectives inside a block are repeated with it, up to the last tensor that
backward needs.  FSDP's gathers are not: parameters are there for backward anyway.

When it wins.  Activations, which grow with tokens times layers, are what does not fit.

What limits it.  Time: ``full`` adds a forward, a third of a step's computation.  And one block's tensors are all alive
while its backward runs.

To keep: memory of one block instead of all, for one more forward.
"""
