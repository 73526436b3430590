"""A training service for the Tinker SDK: clients write the loop, the server computes.

::

    SDK ──► app: HTTP ──► database: sqlite, every request as it comes ──┬─► training: one thread, a learner per model
             ▲                                                           └─► sampling: the JAX engine, adapters by path
             └── retrieve_future ◄── results

``wire`` converts the SDK's messages. A request is known by its client and number, so that one sent
again is answered, not repeated.
"""
