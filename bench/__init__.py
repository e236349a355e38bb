"""Measurements: how fast things are here, side by side with what others do."""
