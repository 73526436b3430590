"""Runs model-written programs, without trusting them.

::

    Sandbox.run(argv, files) ──► isolation (bubblewrap) ──► guard (hard limits, no privileges) ──► the program
            │                                                                                        │
            └─ process: wall clock · output · memory and files of the whole tree ──► kill ◄──────────┘

``runner`` the public interface · ``isolation`` and ``seccomp`` what a program may see and ask of the kernel ·
``limits`` what it may use, and what its processes use · ``process`` one program from start to end, paused between two
requests. Three files run inside: ``guard`` just before the program; ``program_side``
and ``tests_side`` run a program and its tests in separate processes. Nothing falls back to running unprotected:
``unsafe_local`` must be requested.
"""

from jax_agent_rl.tool_server.sandbox.isolation import Link
from jax_agent_rl.tool_server.sandbox.limits import SandboxLimits, SandboxResult, StopCause
from jax_agent_rl.tool_server.sandbox.process import SandboxProcess
from jax_agent_rl.tool_server.sandbox.runner import Sandbox, open_sandbox

__all__ = ["Link", "Sandbox", "SandboxLimits", "SandboxProcess", "SandboxResult", "StopCause", "open_sandbox"]
