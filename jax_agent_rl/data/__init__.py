"""Dataset rows.

``reader`` reads their files, JSON Lines and Parquet · ``rows`` their checks, images and videos of
their prompts · ``task_folder`` where a row names the folder of its task · ``dataset`` all rows of a
source · ``cursor`` their order · ``tasks`` built-in ones.
"""
