"""Dataset rows.

``rows`` reading and checking them · ``cursor`` their order · ``calculator`` and ``shop`` built-in tasks.
"""
