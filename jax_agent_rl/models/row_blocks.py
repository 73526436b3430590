"""Products whose sums are the same on every mesh.

A compiler chooses the order in which a product adds up by the product's shape, and a mesh changes
that shape; devices that share a matrix by its inputs also add up each other's sums. Here a matrix
is cut along its outputs, into blocks whose number the model decides, and each block is a product
of its own::

    matrix [out, in] ──► n blocks [out / n, in]
                           ├──► device 0: the first n / t  x  all inputs ──┐
                           ├──► …                                          ├──► all outputs
                           └──► device t - 1: the last n / t  x  all ──────┘

One device computes all n blocks, t devices n / t each. The inputs are gathered before a product,
which is exact, and no sum crosses devices.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowBlocks:
    """A matrix that is multiplied in blocks.

    Attributes:
        matrix: [..., out, in].
        axis: the axis that is cut, and that devices share; not the last.
        count: number of blocks, a multiple of the devices and a divisor of the axis.
        spec: how devices share the matrix.
        mesh: None on one device.
    """

    matrix: Any
    axis: int = field(metadata={"static": True})
    count: int = field(metadata={"static": True})
    spec: PartitionSpec = field(metadata={"static": True})
    mesh: Mesh | None = field(default=None, metadata={"static": True})

    def product(self, x: jax.Array, *, dtype: jnp.dtype | None = None) -> jax.Array:
        """Multiply with x [in, B] -> [..., out, B].

        Args:
            dtype: of the sums; None: as in ``x``.
        """
        size = self.matrix.shape[self.axis] // self.count
        multiply = functools.partial(_multiply, axis=self.axis, size=size, dtype=dtype)
        if self.mesh is None:
            return multiply(self.matrix, x)

        run = jax.shard_map(
            multiply,
            mesh=self.mesh,
            in_specs=(self.spec, PartitionSpec()),
            out_specs=self.spec,  # columns take the place of inputs, which are not split
            check_vma=False,
        )
        return run(self.matrix, x)


def _multiply(
    matrix: jax.Array, x: jax.Array, *, axis: int, size: int, dtype: jnp.dtype | None
) -> jax.Array:
    """Multiply the blocks of ``size`` that a device has along an axis."""
    shape = matrix.shape
    blocks = matrix.reshape(*shape[:axis], -1, size, *shape[axis + 1 :])
    columns = jnp.broadcast_to(x, (*blocks.shape[:-2], *x.shape))
    # Without a copy for each block the compiler would make one product of all.
    columns = jax.lax.optimization_barrier(columns)
    out = jnp.einsum("...od,...db->...ob", blocks, columns, preferred_element_type=dtype)
    return out.reshape(*shape[:-1], x.shape[-1])
