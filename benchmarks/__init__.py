"""What the figures in the README come from: `make bench`."""

TURNS = 5  # of a comparison with a peer
