"""The training step itself, with nothing divided.

What it does.  Counts the tokens that count in the global batch, runs each micro-batch forward and backward, divides the
summed loss by that count, measures one gradient norm, clips, and lets the optimizer update what the rank owns.

How.  Every other room divides something; what the divisions leave on a rank (parameters, gradients, optimizer state, a
master copy) is priced here, from all of them together, because only here are they seen together.

What it communicates.  One integer (counted tokens, over dp), one float64 (the loss that is shown), and one small vector
for each axis over which squared norms must be completed.

What limits it.  Parameters, gradients and optimizer state grow with the model, saved activations with tokens times
layers, logits with tokens times vocabulary.

To keep: the sum is taken over everybody, and divided once, by the number of tokens that count.
"""
