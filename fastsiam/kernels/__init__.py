"""Compiled code of our own, and the threads that it runs in."""
