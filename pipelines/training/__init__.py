"""The one optimiser loop: batches, loss components, checkpoints, exact resume."""
