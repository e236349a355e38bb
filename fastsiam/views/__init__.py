"""Augmented views of images: batches, random parameters, and photometric augmentations."""
