"""Helpers without a subject of their own.

``http_server``, ``json_service``, ``network`` and ``prometheus`` for services ·
``threads`` and ``interrupt`` for time limits and signals · ``files``, ``tempdirs``, ``checksums``, ``hub`` for files ·
``media``, ``text``, ``plugins``, ``startup``, ``weight_probe``.
"""
