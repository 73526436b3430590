"""The tool server: tools behind HTTP, decoupled from training.

Start it with ``jax-agent-rl tool-server tools=[python,search] …``.

::

    agents ──POST /get_observation──► front ──by trajectory──► worker ──► service ──► tool ──► sandbox
                                        │                        │
                              metrics, health            environments of its trajectories

``wire`` requests and answers · ``front`` the process clients speak to · ``pool`` and ``worker`` the
others · ``service`` one action after another · ``environments`` opened when needed, closed exactly once ·
``telemetry`` · ``plugin`` what a tool is · ``plugins`` the tools · ``sandbox``.
"""
