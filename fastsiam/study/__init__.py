"""Reproduction of the paper's tables and figures, at full or reduced scale.

``catalogue`` defines the studies, and ``scales`` the recipes that they modify. ``runs`` describes
each training run; ``runner`` executes runs in subprocesses. ``record`` collects the results,
``verdicts`` judges the paper's claims, and ``table`` and ``pictures`` render both. Only
``detection`` (Table 5) imports torch when it is imported.
"""
