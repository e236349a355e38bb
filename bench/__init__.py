"""Benchmarks of this machine, with comparisons to other libraries.

``cases`` holds what is measured, a file for each command, with what works in the processes that
``runner`` starts and times. ``records`` are written then; ``tables``, ``charts``, ``finding`` and
``report`` show them, and import nothing that measures.
"""
