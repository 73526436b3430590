"""Helpers without a subject of their own.

``http_server``, ``json_service``, ``network`` and ``prometheus`` for services ·
``threads`` and ``interrupt`` for time limits and signals · ``files``, ``tempdirs``, ``hub`` for files ·
``weight_checks``, ``media``, ``text``, ``plugins``, ``startup``.
"""
