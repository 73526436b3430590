"""Programs as agents: ``agent_name: command`` runs a command line in the sandbox or in a container.

- ``agent``: the agent loop.
- ``task``: what a row asks of the program, also as a task folder in Harbor's format.
- ``machines``: the sandbox that runs it, or Docker or Podman instead.
- ``shell``: the environment of that name, in which the policy itself runs commands.
- ``runner``: the program inside that starts the command and connects it to the endpoint.
"""
