"""Difficulty filtering: which problems teach a given policy something."""
