"""Benchmarks of this machine, with comparisons to other libraries.

``cases`` has a module for each command, with its rows and the tasks for the processes that
``runner`` starts and times. ``session`` runs a case and writes its records (``measurements``).
``tables``, ``charts``, ``finding`` and ``report`` present them, and import nothing that measures.
"""
