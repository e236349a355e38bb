"""Evaluation of trained networks: kNN, linear, fine-tuning and detection, and their records."""
