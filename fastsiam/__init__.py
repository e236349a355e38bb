"""SimSiam pre-training at the speed of the hardware. Importing this package leaves torch alone."""

__version__ = "0.2.0"
