"""Helpers without a subject of their own.

- Services: ``http_server``, ``network``, ``prometheus``, ``services``.
- Code of others: ``failures``, ``loop_watch``, ``packages``, ``plugins``, ``timeouts``,
  ``worker_pool``.
- The process: ``startup``, ``shutdown``.
- Files: ``files``, ``fingerprints``, ``hub``, ``media``, ``weight_transfer``, ``weight_deltas``.
- Text: ``bounded_json``, ``config_words``, ``fences``, ``ids``, ``near_names``, ``surrogates``,
  ``text``, ``wrong_values``, ``yaml_text``.
"""
