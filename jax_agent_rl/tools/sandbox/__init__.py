"""Runs programs a model wrote, without trusting them.

::

    Sandbox.run(argv, files) ──► isolation (bubblewrap) ──► guard (hard limits, no privileges) ──► the program
            │                                                                                        │
            └─ process: wall clock · output · memory and files of the whole tree ──► kill ◄──────────┘

``limits`` what a program may use · ``bubblewrap`` and ``seccomp`` what it may see and ask of the kernel · ``guard``
what runs just before it · ``watch`` what the tree of processes uses · ``process`` one program from start to end ·
``runner`` the public face. Nothing falls back to running unprotected: ``unsafe_local`` has to be asked for.
"""

from jax_agent_rl.tools.sandbox.limits import SandboxLimits, SandboxResult, StopCause
from jax_agent_rl.tools.sandbox.process import SandboxProcess
from jax_agent_rl.tools.sandbox.runner import Sandbox, open_sandbox

__all__ = ["Sandbox", "SandboxLimits", "SandboxProcess", "SandboxResult", "StopCause", "open_sandbox"]
