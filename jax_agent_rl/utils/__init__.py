"""Helpers without a subject of their own.

``http_server``, ``network`` and ``prometheus`` for services · ``threads`` and ``process`` for time
limits, start-up and signals · ``files``, ``hub`` for files · ``weight_transfer``, ``media``,
``plugins``.
"""
