"""A training service for the Tinker SDK: clients write the loop, the server computes.

::

    SDK ──► app: HTTP ──► database: sqlite, ──┬─► training: one thread, a learner per model
             ▲            every request       └─► sampling: the JAX engine, adapters by path
             │            as it comes                 │
             └── retrieve_future ◄── results ◄────────┘

``wire`` converts the SDK's messages. A request is known by its client and number, so that one sent
again is answered, not repeated.
"""
