"""Rollout: how agents reach engines.

Reading order: ``protocol`` what an engine is · ``server`` one engine and its running requests · ``routing`` which
server takes a request · ``request_queue`` requests that wait for a server · ``pool`` the servers, from start to close:
weights, losses, replacement, with ``watchdog`` for stalled ones · ``client`` ``generate`` over all of them, with
``merge_outputs`` for interrupted requests.
Beside them: ``engine_metrics`` Prometheus metrics · ``http`` engines on other machines · ``ray`` engines in Ray
actors · ``proxy`` what these two share.
"""
