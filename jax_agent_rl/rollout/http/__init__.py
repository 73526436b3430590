"""A rollout backend on another machine: any backend served over HTTP, and the client that is a backend itself.

::

    RemoteBackend ──POST /v1/generate──►  RolloutServer ──► any RolloutBackend
        ▲                                      │
        └── lines of JSON: chunks, or nothing but heartbeats; the last one is the result or the error

``wire`` types to JSON and back · ``pictures`` images and videos as PNG · ``server`` · ``uploads`` weight files on their
way in · ``client``.
"""
