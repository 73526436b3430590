"""A rollout backend in a Ray actor: any backend in a process of its own, on any node of a cluster.

::

    RayBackend ──Ray calls──► EngineHost ──► any RolloutBackend
        │                        ▲
        └─ update_weights ───────┤ a reference; the tensors stand once per node in Ray's object store,
           (StoredWeights)       └ are read where they stand, checked, and then given to the engine

``weights`` a policy's weights in the object store · ``host`` the plain class inside the actor · ``backend`` the side of
the caller. Nothing of them but ``backend`` knows Ray.
"""
