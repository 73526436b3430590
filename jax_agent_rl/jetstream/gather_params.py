"""The learner's parameters once more on every process (host), laid out as the engine there takes them.

::

    learner's mesh, all processes ──all-gather, parameter by parameter──► whole on each process ──► its engine's devices
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from jax_agent_rl.jetstream.layout import parameter_places
from jax_agent_rl.jetstream.weight_loading import moved, staging_mesh
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.mesh import MESH_AXES


class GatherParams:
    """Copies parameters from a mesh of all processes to each process's engine.

    All processes have to call it, in the same order as whatever else they compute together. No device ever holds more
    than its engine's part of the model and one parameter besides.

    Args:
        mesh: of this process's engine; those of the others are like it.
        dtype: of the copies.
    """

    def __init__(self, model: DecoderConfig, mesh: Mesh, *, dtype: str) -> None:
        self._dtype = jnp.dtype(dtype)
        self._here = parameter_places(model, mesh)
        self._everywhere = parameter_places(model, on_every_process(mesh))

    def __call__(self, params: Params) -> Params:
        """The copy of this process, valid until the learner's next update: it may share the learner's memory."""
        return jax.tree.map(self._copy, params, self._everywhere, self._here)

    def _copy(self, x: jax.Array, everywhere: NamedSharding, here: NamedSharding) -> jax.Array:
        whole = jax.device_put(x.astype(self._dtype), everywhere)
        copy = moved(whole, here)
        # In turn: else the next parameters would be gathered before this one has left.
        return jax.block_until_ready(copy)


def on_every_process(engine: Mesh) -> Mesh:
    """All devices of all processes, in whole copies of an engine's mesh as far as each process's devices go."""
    owners = (tuple(jax.local_devices(process_index=number)) for number in range(jax.process_count()))
    parts = [staging_mesh(engine, devices).devices for devices in owners]
    devices = np.concatenate(parts, axis=MESH_AXES.index("data"))
    return Mesh(devices, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
