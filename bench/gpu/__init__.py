"""All that a GPU is wanted for, in one command that uses the minutes it is given.

``stages`` is the table of what is done, ``campaign`` does it, a process for each stage; what is
known of a stage is kept when it ends, so that a later call goes on where this one stopped.
``expected`` says what was expected before a GPU had run anything, ``page`` puts both side by side.
"""
