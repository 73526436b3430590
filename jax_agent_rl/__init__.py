"""Train language-model agents with reinforcement learning, JAX/TPU first.

Importing this package loads no heavy library: jax, transformers and the like load where they are
used.
"""

__version__ = "0.2.0"
