"""Self-supervised pre-training of vision models. Importing the package does not import torch."""

__version__ = "0.3.0"
