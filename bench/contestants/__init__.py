"""The contestants: what works in processes of its own while ``fastsiam bench`` measures it.

Each file belongs to the case of its name and holds functions ``build_...``: called in such a
process with a contender's settings, they return its work by name; see ``contest.Build``.
"""
