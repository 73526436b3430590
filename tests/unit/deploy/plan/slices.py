"""Devices of a slice, without the compiler that knows them."""

from __future__ import annotations

from jax_agent_rl.deploy.plan.topology import Slice


class Device:
    """As much of a device as a mesh looks at."""

    platform = device_kind = "cpu"

    def __init__(self, number: int, host: int = 0) -> None:
        self.id = number
        self.process_index = host


def devices_of(slice: Slice, *, hosts: int = 1) -> list[Device]:
    """All of them, over so many hosts."""
    return [Device(number, number * hosts // slice.chips) for number in range(slice.chips)]
