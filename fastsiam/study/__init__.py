"""Reproduction of the paper's tables and figures, at full or reduced scale.

Only ``detection`` (Table 5) imports torch when it is imported.
"""
