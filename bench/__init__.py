"""Measurements: how fast things are here, side by side with what others do.

``cases`` says what is measured, a file for each command; ``contestants`` holds what works while it
is measured, in processes that ``contest`` starts, tells and times. ``records`` are what comes of
it; ``tables``, ``charts``, ``finding`` and ``report`` show them, and need nothing that measures.
"""
