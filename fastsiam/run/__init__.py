"""The folder of a run: its lock, checkpoints, metrics, trackers and evaluation records."""
