"""The training loop that all methods share, losses, and which parts of a tower are tuned."""
