"""Measures of a trained network: kNN, linear evaluation, fine-tuning, and their records."""
