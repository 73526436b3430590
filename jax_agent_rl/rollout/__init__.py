"""Rollout: how agents reach engines.

Reading order: ``protocol`` what an engine is · ``server`` one engine: its running requests, updates
and metrics, and the watchdog · ``routing`` which server takes a request · ``request_queue``
requests that wait for a server · ``pool`` servers, from start to close: weights, losses,
replacement · ``client`` ``generate`` over all of them, with ``merge_outputs`` for interrupted
requests. Beside them: ``http`` engines on other machines · ``ray_backend`` engines in Ray actors,
with weights from Ray's ``object_store`` · ``proxy`` what these two share.
"""
