"""A soak: runs that are hurt again and again, and have to end as the undisturbed ones do.

``campaign`` is ``fastsiam bench soak``; ``subject`` is a run under test, ``faults`` what is done to
it, ``vitals`` what it holds of the machine meanwhile and whether that grows; ``record`` is what is
kept of it all, and its tables.
"""
