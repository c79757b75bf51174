"""Composing rewards, and learned reward models as rewards."""
