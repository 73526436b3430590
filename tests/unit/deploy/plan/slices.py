"""Devices of a slice, without the compiler that knows them."""

from __future__ import annotations

from jax_agent_rl.deploy.plan.topology import Slice


class Device:
    """As much of a device as a mesh looks at."""

    platform = device_kind = "cpu"

    def __init__(self, number: int, host: int = 0) -> None:
        self.id = number
        self.process_index = host


def described(name: str, *, hosts: int = 1) -> Slice:
    """The slice of this name, its devices over so many hosts."""
    slice = Slice.parse(name)
    vars(slice)["devices"] = [
        Device(number, number * hosts // slice.chips) for number in range(slice.chips)
    ]
    return slice
