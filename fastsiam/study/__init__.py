"""The paper's study: its tables and figures by name, run at a scale, judged and shown.

``catalogue`` has the studies (``comparisons`` those with other methods, in the words of ``tables``)
and ``scales`` the recipes that they change (``related`` the other methods'); ``runs`` is where a
run lies and what is left to do of it, ``runner`` does that in processes; ``results`` reads a run,
``verdicts`` judges, ``record`` keeps, ``table`` and ``pictures`` show. No module loads torch before
it is needed.
"""
