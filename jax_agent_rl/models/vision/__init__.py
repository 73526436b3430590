"""Images and videos in a model.

``image_processor`` pixels to patches · ``context`` where they stand in a sequence · ``tower`` patches to features.
"""
