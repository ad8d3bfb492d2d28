"""Training: one step written once for every layout, the data, the trainer round it, and its launch."""
