"""The paper's tables and figures as studies, which are run at a scale and compared with the paper.

``catalogue`` defines the studies and ``scales`` the recipes that they change. ``runs`` has the
state of each run, and ``runner`` checks the runs and executes them in processes.
``record`` saves the results, ``verdicts`` judges them, ``table`` and ``pictures`` show them. No
module imports torch before it is needed.
"""
