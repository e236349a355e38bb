"""Views of images: batches, random parameters, and the photometric augmentations."""
