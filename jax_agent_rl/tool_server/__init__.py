"""The tool server: tools behind HTTP, decoupled from training.

Start it with ``jax-agent-rl tool-server tools=[python,search] …``.

::

    agents ──POST /get_observation──► server ──by trajectory──► worker ──► service ──► tool
                                        │                                    │           │
                                 metrics, health       environments of its trajectories  ▼
                                                                                      sandbox

``server`` is the process that clients talk to, ``worker`` a process that it starts. ``service``
executes actions, and opens and closes environments. ``plugins`` holds the interface of a tool and
the built-in tools. ``sandbox`` runs model-written programs.
"""
