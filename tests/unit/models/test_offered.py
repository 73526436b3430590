"""Weights that one process offers on its devices and another pulls onto its own; here both are one
process, which reaches itself on loopback.
"""

import contextlib
import itertools
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import SingleDeviceSharding

from jax_agent_rl.config.engines import EngineMeshConfig
from jax_agent_rl.errors import WeightUpdateError
from jax_agent_rl.jetstream.sharding import learner_shardings, make_engine_mesh
from jax_agent_rl.models.config import Params
from jax_agent_rl.models.offered import (
    LEAST_BYTES_PER_SECOND,
    OfferedParams,
    await_arrays,
    check_ticket,
    pull,
)
from jax_agent_rl.models.stored import named
from jax_agent_rl.utils.pull_tickets import OfferedParam, PullTicket
from tests.messages import raises
from tests.simulated import environment_with, run_on_devices
from tests.tiny import TINY, tiny_params
from tests.warm import python

LOOPBACK = "127.0.0.1"
SHAPES = TINY.parameter_shapes()


def pulled(ticket: PullTicket, *, dtype: str = "float32", **options: Any) -> Params:
    """What an engine on the first device gets, which gives up after a moment."""
    return pull(
        ticket,
        SHAPES,
        dtype=jnp.dtype(dtype),
        shardings=learner_shardings(TINY, make_engine_mesh(EngineMeshConfig())),
        **{"digest": None, "stall_seconds": 0.2} | options,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_pulled_is_what_the_learner_had_when_it_was_offered(dtype: str):
    params = tiny_params(3)
    expected = jax.tree.map(lambda x: np.array(x.astype(dtype), np.float32), params)
    offer = OfferedParams(params, version=1, dtype=dtype)
    for x in jax.tree.leaves(params):
        x.delete()  # as the learner's next step does
    for _ in range(2):  # as often as there are engines
        found = pulled(offer.ticket(LOOPBACK), dtype=dtype, digest=offer.digest, stall_seconds=60)
        for name, array in named(found).items():
            assert array.dtype == dtype
            np.testing.assert_array_equal(np.asarray(array, np.float32), named(expected)[name])
    offer.release()


def test_an_engine_in_bfloat16_rounds_what_is_offered_in_float32():
    params = tiny_params(4)
    offer = OfferedParams(params, version=1)
    found = pulled(offer.ticket(LOOPBACK), dtype="bfloat16", stall_seconds=60)
    np.testing.assert_array_equal(
        np.asarray(found["embed"]).view(np.uint16),
        np.asarray(params["embed"].astype("bfloat16")).view(np.uint16),
    )
    offer.release()


RESHARDED = """
from dataclasses import replace

import jax
import numpy as np

from jax_agent_rl.config.engines import EngineMeshConfig
from jax_agent_rl.config.learner import MeshConfig
from jax_agent_rl.jetstream.sharding import learner_shardings, make_engine_mesh
from jax_agent_rl.models.offered import OfferedParams, pull
from jax_agent_rl.models.sharding import make_mesh, parameter_shardings, place
from tests.tiny import TINY, tiny_params

model = replace(TINY, vocab_size=96)
params = tiny_params(1, model)
for mesh, tensor in ((dict(fsdp=4), 1), (dict(fsdp=4), 2), (dict(fsdp=2, tensor=2), 2), ({}, 2)):
    mesh = make_mesh(MeshConfig(**mesh))
    sharded = jax.tree.map(place, params, parameter_shardings(mesh, model.parameter_shapes()))
    offer = OfferedParams(sharded, version=1)
    engine = make_engine_mesh(EngineMeshConfig(tensor=tensor), device_offset=4)
    shardings = learner_shardings(model, engine)
    found = pull(
        offer.ticket("127.0.0.1"),
        model.parameter_shapes(),
        digest=offer.digest,
        dtype=np.dtype("float32"),
        shardings=shardings,
    )
    for leaf, sharding, expected in zip(*map(jax.tree.leaves, (found, shardings, params))):
        assert leaf.sharding == sharding
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(expected))
    print(len({device for leaf in jax.tree.leaves(found) for device in leaf.devices()}))
"""


def test_each_device_of_an_engine_gets_its_part_however_the_learner_is_sharded():
    assert run_on_devices(RESHARDED, devices=6) == ["1", "2", "2", "2"]


# --- what is refused ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def offer() -> Iterator[OfferedParams]:
    offer = OfferedParams(tiny_params(), version=1)
    yield offer
    offer.release()


@pytest.fixture(scope="module")
def ticket(offer: OfferedParams) -> PullTicket:
    return offer.ticket(LOOPBACK)


def altered(param: OfferedParam, field: str, draw: st.DrawFn) -> OfferedParam:
    """A parameter with another shape, type, parts or digests."""
    if field == "dtype":
        return replace(param, dtype=draw(st.sampled_from(["bfloat16", "float64", "int8", "no"])))
    if field == "digests":
        keys = sorted(param.digests)
        change = draw(st.sampled_from(["missing", "added", "renamed"]))
        digests = dict(param.digests)
        if change != "added":
            digests.pop(draw(st.sampled_from(keys)))
        if change != "missing":
            digests[draw(st.sampled_from(["c/9/9", "c", "../c/0", ""]))] = "xxh3_128:0"
        return replace(param, digests=digests)

    sizes = list(getattr(param, field))
    change = draw(st.sampled_from(["more", "fewer", "other"]))
    if change == "more":
        sizes.append(1)
    elif change == "fewer":
        sizes.pop()
    else:
        place = draw(st.integers(0, len(sizes) - 1))
        other = st.integers(0, 2**40).filter(lambda size: size != sizes[place])
        sizes[place] = draw(other)
    return replace(param, **{field: tuple(sizes)})


@given(data=st.data())
def test_an_offer_of_anything_but_the_models_parameters_is_refused_unseen(
    ticket: PullTicket, data: st.DataObject
):
    """Before anything is connected, and in little memory whatever sizes it claims."""
    name = data.draw(st.sampled_from(sorted(ticket.params)))
    params = dict(ticket.params)
    field = data.draw(st.sampled_from(["name", "missing", "shape", "dtype", "chunk", "digests"]))
    param = params.pop(name)
    if field == "name":
        params[data.draw(st.sampled_from(["layers.other", "embed.q", ""]))] = param
    elif field != "missing":
        params[name] = data.draw(st.composite(lambda draw: altered(param, field, draw))())
    wrong = replace(ticket, params=params)
    with pytest.raises(WeightUpdateError):
        check_ticket(wrong, SHAPES, digest=None, dtype=jnp.dtype("float32"))


def test_the_unaltered_offer_is_not_refused(offer: OfferedParams, ticket: PullTicket):
    check_ticket(ticket, SHAPES, digest=offer.digest, dtype=jnp.dtype("float32"))


def test_the_parameter_that_differs_is_named(ticket: PullTicket):
    check = {"digest": None, "dtype": jnp.dtype("float32")}

    def with_embed(**fields: Any) -> PullTicket:
        embed = replace(ticket.params["embed"], **fields)
        return replace(ticket, params={**ticket.params, "embed": embed})

    with raises(WeightUpdateError, key="embed", value="(97, 31)"):
        check_ticket(with_embed(shape=(97, 31)), SHAPES, **check)
    with raises(WeightUpdateError, key="embed", value="bfloat16", fix="float32"):
        check_ticket(with_embed(dtype="bfloat16"), SHAPES, **check)
    with raises(WeightUpdateError, key="embed", value="(2, 32)", fix="one version"):
        check_ticket(with_embed(chunk=(2, 32)), SHAPES, **check)
    with raises(WeightUpdateError, key="jaxlib", value="0.0.1", fix="rollout.weight_transport"):
        check_ticket(replace(ticket, jaxlib="0.0.1"), SHAPES, **check)
    with raises(WeightUpdateError, key="the ticket", value="xxh3_128:0"):
        check_ticket(ticket, SHAPES, digest="xxh3_128:0", dtype=jnp.dtype("float32"))


def test_other_bytes_than_were_offered_are_refused_by_the_name_of_their_part(
    offer: OfferedParams,
):
    ticket = offer.ticket(LOOPBACK)
    query = ticket.params["layers.q"]
    (key,) = query.digests
    damaged = replace(query, digests={key: "xxh3_128:0"})
    with raises(WeightUpdateError, key=f"layers.q/{key}", value="xxh3_128:0"):
        pulled(replace(ticket, params={**ticket.params, "layers.q": damaged}), stall_seconds=60)


# --- a learner that is not there ------------------------------------------------------------------


def test_a_version_that_was_replaced_is_not_offered():
    offer = OfferedParams(tiny_params(), version=7)
    ticket = offer.ticket(LOOPBACK)
    offer.release()
    with raises(WeightUpdateError, key="version 7"):
        offer.ticket(LOOPBACK)
    with raises(WeightUpdateError, key=f"{LOOPBACK}:{ticket.port}", fix="weight_transport=files"):
        pulled(ticket)


def test_a_number_serves_one_pull_and_no_other_number_does(offer: OfferedParams):
    ticket = offer.ticket(LOOPBACK)
    pulled(ticket, stall_seconds=60)
    for number in (ticket.number, ticket.number ^ 1):
        with raises(WeightUpdateError, key=f"{LOOPBACK}:{ticket.port}", fix="Open the ports"):
            pulled(replace(ticket, number=number))


FREEZING = """
import os
import signal
import sys

import jax
from jax.sharding import SingleDeviceSharding

from jax_agent_rl.models.offered import start_server

port, number, count, size = map(int, sys.argv[1:])
device = jax.devices()[0]
struct = jax.ShapeDtypeStruct((size,), "float32", sharding=SingleDeviceSharding(device))
server = start_server("127.0.0.1", device)
arrays = server.connect(f"127.0.0.1:{port}").pull(number, [struct] * count)
arrays[0].block_until_ready()
print("frozen", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_an_engine_that_freezes_during_a_pull_holds_up_no_other():
    count = 16
    size = 2 << 20  # in all more than connections buffer
    params = {"layers": {f"{i:02}": jnp.full(size, i, jnp.float32) for i in range(count)}}
    offer = OfferedParams(params, version=1)
    ticket = offer.ticket(LOOPBACK)
    arguments = [str(number) for number in (ticket.port, ticket.number, count, size)]
    with subprocess.Popen(
        [*python(), "-c", FREEZING, *arguments],
        env=environment_with(1),
        stdout=subprocess.PIPE,
        text=True,
    ) as frozen:
        try:
            assert frozen.stdout is not None
            assert frozen.stdout.readline() == "frozen\n"
            device = SingleDeviceSharding(jax.devices()[0])
            found = pull(
                offer.ticket(LOOPBACK),
                jax.tree.map(lambda x: x.shape, params),
                digest=offer.digest,
                dtype=jnp.dtype("float32"),
                shardings=jax.tree.map(lambda x: device, params),
            )
        finally:
            frozen.kill()
            offer.release()
    assert [float(x[-1]) for x in found["layers"].values()] == list(range(count))


@contextlib.contextmanager
def listening(*, answers: bool) -> Iterator[int]:
    """A port whose connections are closed at once, or kept without a word."""
    with socket.create_server((LOOPBACK, 0)) as server, contextlib.ExitStack() as kept:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    if answers:
                        connection.close()
                    else:
                        kept.enter_context(connection)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize("answers", [False, True])
def test_a_learner_that_hangs_or_ends_during_a_pull_is_not_waited_for(
    ticket: PullTicket, answers: bool
):
    with (
        listening(answers=answers) as port,
        raises(WeightUpdateError, key=f"{LOOPBACK}:{port}"),
    ):
        pulled(replace(ticket, port=port))


@dataclass
class Clock:
    """Time that passes only while somebody sleeps."""

    seconds: float = 0.0

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


@dataclass
class ArrivingPart:
    """A part that arrives at some time."""

    clock: Clock
    arrives: float
    nbytes: int

    def is_ready(self) -> bool:
        return self.clock.seconds >= self.arrives

    def block_until_ready(self) -> None:
        assert self.is_ready()


def await_parts(clock: Clock, gaps: Sequence[float], nbytes: int) -> None:
    """Wait for parts that arrive one after another, with seconds between them."""
    parts = []
    for arrives in itertools.accumulate(gaps):
        parts.append(ArrivingPart(clock, arrives, nbytes))
    await_arrays(parts, "peer:1", stall_seconds=30.0, now=clock.now, sleep=clock.sleep)


PART_BYTES = int(LEAST_BYTES_PER_SECOND)
"""Bytes that a network which is just fast enough sends in a second."""


def test_a_learner_that_trickles_holds_up_an_update_once_and_not_for_every_part():
    """Each part comes in time, and all of them together take longer than they may."""
    clock = Clock()
    with raises(
        WeightUpdateError,
        key="peer:1",
        value=("40,000,000 of 100,000,000 bytes", "40 seconds"),
        fix="weight_transport=files",
    ):
        await_parts(clock, [9.0] * 10, PART_BYTES)
    assert clock.seconds == pytest.approx(30 + 10, abs=0.1)


def test_a_slow_network_may_take_its_time():
    """A pause, and then as many bytes per second as a network has to send at least."""
    clock = Clock()
    await_parts(clock, [25.0, *[1.0] * 9], PART_BYTES)
    assert clock.seconds == pytest.approx(34, abs=0.1)


def test_a_learner_that_falls_silent_is_given_up_before_all_parts_could_have_come():
    clock = Clock()
    with raises(WeightUpdateError, key="peer:1", value="31 seconds", fix="Open the ports"):
        await_parts(clock, [1.0, 1.0, *[1e9] * 1000], PART_BYTES)
    assert clock.seconds == pytest.approx(2 + 31, abs=0.1)
