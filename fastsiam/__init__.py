"""SimSiam pre-training at the speed of the hardware. Importing this package imports no torch."""

__version__ = "0.3.0"
