"""Dataset rows.

``reader`` reads their files, JSON Lines and Parquet · ``rows`` their checks, images and videos of their prompts ·
``dataset`` all rows of a source · ``cursor`` their order · ``tasks`` built-in ones.
"""
