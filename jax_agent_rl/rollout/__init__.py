"""Rollout: how agents reach engines.

Reading order: ``protocol`` what an engine is · ``server`` one engine: its running requests and
updates · ``routing`` which server takes a request · ``request_queue`` requests that wait for a
server · ``watchdog`` which servers are lost · ``pool`` servers, from start to close: weights,
losses, replacement · ``client`` ``generate`` over all of them, with ``merge_outputs`` for
interrupted requests. Beside them: ``engine_metrics`` and ``fleet_metrics`` the counters of one
engine and of all · ``http`` engines on other machines · ``ray_backend`` engines in Ray actors ·
``proxy`` what these two share · ``transport`` how weights reach engines.
"""
