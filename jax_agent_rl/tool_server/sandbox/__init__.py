"""Runs model-written programs, without trusting them.

::

    Sandbox.run ──► isolation ──► guard ─────────────► the program
            │      (bubblewrap)  (hard limits,           │
            │                     no privileges)         │
            │                                            ▼
            └─ process: wall clock · output · memory and files of the whole tree ──► kill

``sandbox`` opens a sandbox and runs programs in it. ``isolation`` and ``seccomp`` define what a
program may see and what it may ask of the kernel. ``limits`` defines what it may use, and measures
what its processes use. ``process`` takes one program from start to end, paused between two
requests. Three files run inside: ``guard`` just before the program; ``program_side`` and
``tests_side`` run a program and its tests in separate processes.

:func:`open_sandbox` tests a sandbox before it is trusted. Nothing falls back to running
unprotected: ``unsafe_local`` must be requested.

Tests of a program run outside its process, so that it cannot influence the verdict::

    tests.py ──► tests_side ──request: name, call, attribute──► program_side ──► main.py
       │             ▲                                              │
    verdict          └────────── plain data, or an exception ◄──────┘
    (exit code)

Both sides are programs in sandboxes of their own that share nothing but two pipes. The program's
process holds neither the tests nor what they expect, and nothing it does to itself reaches the
process that compares.

Before tests are used for the first time, they run on nonsense answers, in a sandbox as well: tests
that pass then say nothing about a program (:mod:`jax_agent_rl.tool_server.sandbox.tests_side`).
"""

from jax_agent_rl.tool_server.sandbox.isolation import Link
from jax_agent_rl.tool_server.sandbox.limits import SandboxLimits, SandboxResult, StopCause
from jax_agent_rl.tool_server.sandbox.process import SandboxProcess
from jax_agent_rl.tool_server.sandbox.sandbox import Sandbox, open_sandbox

__all__ = [
    "Link",
    "Sandbox",
    "SandboxLimits",
    "SandboxProcess",
    "SandboxResult",
    "StopCause",
    "open_sandbox",
]
