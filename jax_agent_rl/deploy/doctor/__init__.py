"""``jax-agent-rl doctor``: checks for what would stop or spoil a run, each with what to do about it.

``findings`` what a check reports, and how a failing one hides no other · ``machine``, ``accelerators`` what
needs no configuration · ``inputs`` model and rows · ``services`` what a run speaks to · ``examine`` which checks there
are. The checks call what a run itself calls at its start.
"""
