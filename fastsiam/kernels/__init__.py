"""Compiled image kernels and the thread pool that runs them."""
