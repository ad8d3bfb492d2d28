"""Distributed data parallel: the batch is divided, the model is not.

What it does.  Every data rank holds the whole model and runs its own part of the global batch.

How.  Torch's ``DistributedDataParallel`` groups gradients into buckets in the order in which backward makes them
ready, and all-reduces each bucket while backward goes on with earlier layers.

What it communicates.  Every gradient byte once a step, in buckets: 2(r-1)/r of it leaves each of r ranks (Li et al.
2020, "PyTorch Distributed", section 3.2).  Accumulated micro-batches add nothing: only the last one synchronises.

When it wins.  The model, its gradients and its optimizer state fit on one device, and a backward pass lasts longer
than the reduction of all but the last bucket.

What limits it.  Memory: nothing of the model state shrinks with ranks.  The tail: the last bucket's reduction cannot
hide.

To keep: everything is everywhere, so only the gradients travel.
"""
