"""The paper's study: its tables and figures by name, run at a scale, judged and shown.

``catalogue`` has the studies and ``scales`` the recipes that they change; ``runs`` is where a run
lies and what is left to do of it, ``preparation`` checks, ``runner`` does them in processes;
``record`` keeps the results, ``verdicts`` judges, ``table`` and ``pictures`` show. No module loads
torch before it is needed.
"""
