"""TPU chips by generation, as Cloud TPU's documentation states them (docs.cloud.google.com/tpu, 2026).

The slices there are of each are in ``tpu_shapes``.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One generation of TPU.

    Attributes:
        hbm_bytes: memory of a chip that programs get; libtpu, which keeps some, says how much.
        flops: peak bfloat16 operations per second; a multiplication and an addition count as two.
        hbm_bandwidth: bytes per second between a chip and its memory.
        link_bandwidth: bytes per second and direction of one link to a neighbour.
        dcn_bandwidth: bytes per second and direction of a chip's share of the network between slices.
        hosts: shapes of slices that are one host; larger ones are of hosts of four chips.
        config: libtpu's name for how its cores make devices; None where it supposes one device a chip by itself.
    """

    name: str
    hbm_bytes: int
    flops: float
    hbm_bandwidth: float
    link_bandwidth: float
    dcn_bandwidth: float
    hosts: tuple[tuple[int, ...], ...]
    config: str | None = None


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="v4",
            hbm_bytes=int(30.75 * GIB),
            flops=275e12,
            hbm_bandwidth=1200e9,
            link_bandwidth=50e9,  # of 6 links (Jouppi et al. 2023, arXiv 2304.01433)
            dcn_bandwidth=1.6e9,  # 81 Tbps between 1536 hosts (Chowdhery et al. 2022, arXiv 2204.02311, section 4)
            hosts=((2, 2, 1),),
            config="megacore",  # both cores of a chip are one device, as they are for JAX on a real one
        ),
        Chip(
            name="v5e",
            hbm_bytes=int(15.75 * GIB),
            flops=197e12,
            hbm_bandwidth=819e9,
            link_bandwidth=50e9,  # 400 GB/s in both directions over 4 links
            dcn_bandwidth=3.1e9,
            hosts=((1, 1), (2, 2), (2, 4)),
        ),
        Chip(
            name="v5p",
            hbm_bytes=int(95.74 * GIB),
            flops=459e12,
            hbm_bandwidth=2765e9,
            link_bandwidth=100e9,  # 1200 GB/s in both directions over 6 links
            dcn_bandwidth=6.25e9,
            hosts=((2, 2, 1),),
        ),
        Chip(
            name="v6e",
            hbm_bytes=int(31.25 * GIB),
            flops=918e12,
            hbm_bandwidth=1600e9,
            link_bandwidth=100e9,  # 3200 Gbps over 4 links
            dcn_bandwidth=12.5e9,
            hosts=((1, 1), (2, 2), (2, 4)),
        ),
    )
}
