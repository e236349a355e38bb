"""Training: the start of a run, its images, the training step and loop, and monitoring."""
