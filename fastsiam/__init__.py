"""SimSiam pre-training at the speed of the hardware. Importing this package does not import torch."""

__version__ = "0.1.0"
