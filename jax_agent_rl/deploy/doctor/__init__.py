"""``jax-agent-rl doctor``: what would stop or spoil a run, told before it begins, each with what to do.

``findings`` what a check says, and how one that fails is kept from hiding others · ``machine``, ``accelerators`` what
needs no configuration · ``inputs`` model and rows · ``services`` what a run speaks to · ``examine`` which checks there
are · ``command`` the command line. The checks call what a run itself calls at its start.
"""
