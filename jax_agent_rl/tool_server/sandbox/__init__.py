"""Runs programs a model wrote, without trusting them.

::

    Sandbox.run(argv, files) ──► isolation (bubblewrap) ──► guard (hard limits, no privileges) ──► the program
            │                                                                                        │
            └─ process: wall clock · output · memory and files of the whole tree ──► kill ◄──────────┘

``limits`` what a program may use · ``bubblewrap`` and ``seccomp`` what it may see and ask of the kernel · ``guard``
what runs just before it · ``process_tree`` what its processes use, and how they are paused between two requests ·
``cgroup`` where the kernel counts it · ``process`` one program from start to end · ``assertions`` tests of a program,
outside its process · ``runner`` the public interface. Nothing falls back to running unprotected: ``unsafe_local`` has
to be asked for.
"""

from jax_agent_rl.tool_server.sandbox.limits import SandboxLimits, SandboxResult, StopCause
from jax_agent_rl.tool_server.sandbox.process import SandboxProcess
from jax_agent_rl.tool_server.sandbox.runner import Sandbox, open_sandbox

__all__ = ["Sandbox", "SandboxLimits", "SandboxProcess", "SandboxResult", "StopCause", "open_sandbox"]
