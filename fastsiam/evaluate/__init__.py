"""Measures of a frozen backbone's quality."""
