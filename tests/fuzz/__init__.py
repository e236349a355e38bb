"""Readers under fuzzing: valid files are damaged at random, and read as the program reads them.

``targets`` says which files and by whom they are read, ``mutate`` damages them, ``run`` has the
cases done by processes of their own with limits, and ``python -m tests.fuzz`` is the command.
"""
