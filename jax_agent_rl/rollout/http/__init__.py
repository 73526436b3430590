"""A rollout backend on another machine: a server of any backend, and a client that is a backend.

::

    RemoteBackend ──POST /v1/generate──►  RolloutServer ──► any RolloutBackend
        ▲                                      │
        └── lines of JSON: chunks, or nothing but heartbeats; the last is the result or the error

``wire`` types to JSON and back, images and videos included · ``client`` · ``server`` ·
``weight_files`` that a client names by path, or sends · ``membership`` engines that join and leave
a run.
"""
