"""Reward models: preference pairs from verified samples, and Bradley-Terry training of a scalar head."""
