"""Rollout: how agents reach engines.

Reading order: ``protocol`` what an engine is · ``server`` one engine and its running requests · ``routing`` which
server takes a request · ``request_queue`` requests that wait for a server · ``pool`` the servers in rotation and their
weights · ``client`` ``generate`` over all of them, with ``merge_outputs`` for interrupted requests · ``lifecycle``
servers start, join, leave and are replaced, with ``watchdog`` for stalled ones.
Beside them: ``engine_metrics`` Prometheus metrics · ``http`` engines on other machines · ``ray`` engines in Ray
actors · ``proxy`` what these two share.
"""
