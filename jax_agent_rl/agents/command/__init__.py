"""Programs as agents: ``agent_name: command`` runs a command line in the sandbox.

``agent`` the agent loop · ``task`` what a row asks of the program, also as a task folder in Harbor's format ·
``runner`` the program inside the sandbox that starts the command and connects it to the endpoint.
"""
