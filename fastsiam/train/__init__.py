"""Training: the loop, the step, the optimizer, and what is watched on the way."""
