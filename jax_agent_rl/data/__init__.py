"""Dataset rows.

``dataset`` their files · ``rows`` their checks, and JSON Lines · ``parquet`` streaming · ``media`` images and videos of
prompts · ``cursor`` their order · ``calculator`` and ``shop`` built-in tasks.
"""
