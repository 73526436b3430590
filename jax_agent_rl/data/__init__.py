"""Dataset rows.

``dataset`` their files · ``rows`` their checks, JSON Lines and Parquet · ``media`` images and videos of prompts ·
``cursor`` their order · ``tasks`` built-in ones.
"""
