"""What a learner tells an engine that pulls weights from its devices (``models.offered``).

Free of heavy imports, as the wire protocol is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class OfferedParam:
    """A parameter that a learner offers in parts.

    Attributes:
        dtype: name of its type.
        chunk: size of a part in every dimension; the parts are a grid.
        digests: digest of every part, by its key (``models.stored.chunk_key``).
    """

    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]
    digests: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class PullTicket:
    """What an engine needs to pull weights from a learner's devices, once.

    Attributes:
        host: address of the learner's machine.
        interface: address of the engine's machine, by which the learner reaches it.
        port: where the learner's transfer server listens.
        number: secret that the server exchanges for the weights.
        jaxlib: version of the learner's jaxlib, whose protocol has no versions of its own.
        params: what is offered, by dotted name.
    """

    host: str
    interface: str
    port: int
    number: int
    jaxlib: str
    params: Mapping[str, OfferedParam]


class PullOffer(ABC):
    """Weights on a learner's devices, as the payload of an update."""

    @abstractmethod
    def ticket(self, interface: str) -> PullTicket:
        """Let one engine pull them.

        Args:
            interface: address of this machine, by which the engine reaches it.

        Raises:
            WeightUpdateError: they are not offered any longer.
        """
