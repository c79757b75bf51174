"""Sampling: the engine protocol, the native PyTorch engine, and rollouts of problems as records."""
