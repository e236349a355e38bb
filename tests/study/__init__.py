"""Tests of the paper's study."""
