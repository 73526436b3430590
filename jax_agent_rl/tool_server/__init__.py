"""The tool server: tools behind HTTP, decoupled from training.

Start it with ``jax-agent-rl tool-server tools=[python,search] …``.

::

    agents ──POST /get_observation──► server ──by trajectory──► worker ──► service ──► tool ──► sandbox
                                        │                                    │
                              metrics, health                 environments of its trajectories

``server`` the process that clients talk to, its requests and answers · ``worker`` the processes it
starts · ``service`` executes actions, opens and closes environments · ``plugins`` the interface of
a tool, and the built-in tools · ``sandbox`` runs model-written programs.
"""
