"""Self-supervised pre-training with SimSiam and related methods.

Importing this package does not import torch.
"""

__version__ = "0.3.0"
