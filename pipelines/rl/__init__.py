"""Reinforcement learning rounds: advantages, trust region, KL, and the loop that samples and updates."""
