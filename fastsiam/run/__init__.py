"""Folders of runs: checkpoints, metrics, records of evaluations."""
