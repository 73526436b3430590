"""GPUs as XLA's CUDA compiler wants them described, so that programs compile without one.

A described GPU has the limits of its architecture, which the compiler fits kernels to, and the
speeds from which it chooses between them. They are NVIDIA's, from the CUDA programming guide's
tables of compute capabilities and the products' data sheets; no GPU was asked.
"""

from __future__ import annotations

from dataclasses import dataclass

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.models.sharding import Device, expect_described
from jax_agent_rl.utils.packages import install_command, is_installed

PLUGIN = "jax_cuda13_plugin"
"""The package with XLA's CUDA compiler."""
GPUS_PER_HOST = 8
_CUDNN = (9, 20)
_CUDA = 13


@dataclass(frozen=True, kw_only=True)
class GpuTarget:
    """One model of GPU.

    Attributes:
        product: NVIDIA's name, which JAX gives as ``device_kind``.
        capability: compute capability, major and minor.
        cores: streaming multiprocessors.
        memory_bytes: all of its memory.
        memory_bandwidth: bytes per second.
        cache_bytes: level 2 cache.
        clock_ghz: boost clock.
    """

    product: str
    capability: tuple[int, int]
    cores: int
    memory_bytes: int
    memory_bandwidth: float
    cache_bytes: int
    clock_ghz: float

    def as_text(self) -> str:
        """Return the description that the compiler reads (XLA's ``GpuTargetConfigProto``)."""
        major, minor = self.capability
        return f"""
            gpu_device_info {{
              cuda_compute_capability {{ major: {major} minor: {minor} }}
              core_count: {self.cores}
              fpus_per_core: 128
              clock_rate_ghz: {self.clock_ghz}
              memory_bandwidth: {round(self.memory_bandwidth)}
              device_memory_size: {self.memory_bytes}
              l2_cache_size: {self.cache_bytes}
              threads_per_warp: 32
              threads_per_block_limit: 1024
              threads_per_core_limit: 2048
              registers_per_core_limit: 65536
              registers_per_block_limit: 65536
              shared_memory_per_core: 233472
              shared_memory_per_block: 49152
              shared_memory_per_block_optin: 232448
              block_dim_limit_x: 2147483647
              block_dim_limit_y: 65535
              block_dim_limit_z: 65535
            }}
            platform_name: "CUDA"
            device_description_str: "{self.product}"
            dnn_version_info {{ major: {_CUDNN[0]} minor: {_CUDNN[1]} }}
            runtime_version {{ major: {_CUDA} }}
        """


def describe_gpus(target: GpuTarget, *, per_host: int, hosts: int) -> list[Device]:
    """Return described GPUs, by host and number.

    Raises:
        ConfigError: the CUDA compiler is not installed.
    """
    if not is_installed(PLUGIN):
        raise ConfigError(
            "plan compiles for GPUs with XLA's CUDA compiler, which is not installed here; it has"
            f" an environment of its own: {install_command('cuda')}, then that environment's"
            " jax-agent-rl plan"
        )
    from jax.experimental import topologies

    expect_described("cuda")
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name=target.product,
        topology=f"{hosts}x1x{per_host}",
        target_config=target.as_text(),
    )
    return list(topology.devices)
