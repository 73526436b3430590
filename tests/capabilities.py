"""Marks for what a machine may lack. A skipped test names the capability."""

from __future__ import annotations

import pytest

from jax_agent_rl.tool_server.sandbox.isolation import find_bwrap

needs_bwrap = pytest.mark.skipif(find_bwrap() is None, reason="bubblewrap (bwrap)")
