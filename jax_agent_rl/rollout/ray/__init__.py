"""A rollout backend in a Ray actor: any backend in a process of its own, on any node of a cluster.

::

    RayBackend ──Ray calls──► EngineHost ──► any RolloutBackend
        │                        ▲
        └─ update_weights ───────┤ a reference; Ray's object store holds the tensors once per node;
           (StoredWeights)       └ they are read there without copies, checked, and given to the engine

``weights`` a policy's weights in the object store · ``host`` the plain class inside the actor · ``backend`` the
caller's side, which alone imports Ray.
"""
