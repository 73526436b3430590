"""Dataset rows.

``dataset`` their files, JSON Lines and Parquet · ``rows`` their checks, images and videos of their prompts · ``cursor``
their order · ``tasks`` built-in ones.
"""
