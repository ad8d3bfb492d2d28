"""Facts: what a model, a cluster, a layout and a piece of work are, and the rows that account for them.

Frozen dataclasses and pure functions.  Nothing here decides anything, and nothing here needs torch.
"""
