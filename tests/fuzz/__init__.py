"""Fuzzing of all readers: valid files are corrupted at random and read as the program reads them.

``targets`` lists the files and their readers, ``mutate`` corrupts files, ``run`` runs the cases in
separate processes with limits, and ``python -m tests.fuzz`` is the command line.
"""
