"""Model families: how they translate ``config.json`` and :class:`DecoderConfig`, and tensor names.

Every :class:`~jax_agent_rl.models.families.hf_config.ModelFamily` in a module of this package is
registered under its model types (``registry``).
"""

from jax_agent_rl.models.families.registry import FAMILIES, read_config, write_config

__all__ = ["FAMILIES", "read_config", "write_config"]
