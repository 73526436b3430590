"""``jax-agent-rl redteam``: harmless attacks on what a training run trusts least.

::

    Attack ─► target ────────────────────────────► AttackVerdict: held, broke, not applicable
              sandbox      runs programs
              tests        says whether a program passes tests
              server       answers HTTP requests
              endpoint     answers chats of OpenAI's dialect
              judge        reads an answer and grades it
              files        reads what others wrote: models, rows, archives, configurations

Each attack looks for a mark of its own (a file, a connection, a word), so that a verdict is about
what happened and not about an error message. Every payload is harmless and bounded in time. The
targets are this installation's, or other programs' behind small adapters; servers on loopback only.
"""
