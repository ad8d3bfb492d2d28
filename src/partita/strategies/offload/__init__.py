"""Offload: model state that a device need not hold all the time lies in host memory.

What it does.  ``offload=parameters`` keeps FSDP's shards on the host, with their gradients and optimizer state; a shard
visits the device for as long as its unit is gathered.  ``offload=optimizer`` keeps the master copy and the optimizer
state of DDP or ZeRO on the host, where the optimizer also steps.

How.  Gradients are copied to pinned buffers on the host, the optimizer updates the master copies there, and updated
parameters come back through the same buffers.  ``offload=optimizer_delayed`` does not wait: the host works on one
step's gradients while the device runs the next step, so that a step's update uses the gradients of the step before
(ZeRO-Offload, Ren et al. 2021, "one-step delayed parameter update").  The first ``delay_after=`` steps are not delayed.

What it communicates.  Nothing between ranks.  Over the host link a rank sends its gradients and gets its parameters,
once a step.

When it wins.  Optimizer state does not fit on the devices there are, and the host has memory.

What limits it.  The host link and the host's memory bandwidth: AdamW reads and writes 16 bytes a parameter and more.
The delayed update trains on gradients one step old, and needs a master copy even in float32.

To keep: 12 of 16 bytes per parameter are touched once a step, and can wait elsewhere.
"""
