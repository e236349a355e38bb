"""Benchmarks of this machine, with comparisons to other libraries.

``cases`` holds what is measured, a file for each command: its rows, and what works in the processes
that ``runner`` starts and times. ``session`` executes a case. ``records`` are written then;
``tables``, ``charts``, ``finding`` and ``report`` show them, and import nothing that measures.
"""
