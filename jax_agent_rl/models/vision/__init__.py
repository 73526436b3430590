"""Images and videos in a model.

``image_processor`` pixels to patches · ``context`` a context with images · ``layout`` where they stand in a sequence ·
``tower`` patches to features.
"""
