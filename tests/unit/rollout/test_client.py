"""The client: one whole output whatever happens to the engines below."""

import asyncio
from dataclasses import replace

import pytest

from jax_agent_rl.errors import (
    BackendClosedError,
    BackendError,
    EngineDiedError,
    TokenDriftError,
    WeightUpdateError,
)
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.protocol import RolloutBackend, TokenChunk, WeightUpdate
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.types import PauseMode, SamplingParams, StopReason, digest_ids
from tests.fakes import EOS, FakeCodec, ScriptedBackend
from tests.messages import raises

WORDS = "one two three four five six seven"
PROMPT = [5, 6, 7]


class Fleet:
    """Servers that are replicas of one model, and a client over them."""

    def __init__(self, count=1, script=(WORDS,), backend=ScriptedBackend):
        self.codec = FakeCodec()
        self.backends = [backend(self.codec, script) for _ in range(count)]
        for replica in self.backends[1:]:
            self.backends[0].share_plans(replica)
        self.servers = [AsyncServer(b, name=f"s{i}") for i, b in enumerate(self.backends)]
        self.client = LLMServerClient(self.servers)

    @property
    def whole(self):
        return tuple(self.codec.reply_ids(WORDS))

    def ask(self, request_id="r", *, max_tokens=100, **fields):
        sampling = SamplingParams(max_tokens=max_tokens, seed=3)
        return asyncio.ensure_future(
            self.client.generate(request_id, prompt_ids=PROMPT, sampling_params=sampling, **fields)
        )

    async def sampled(self, count):
        """Waits until that many ids were sampled, then holds the engines."""
        while sum(b.sampled for b in self.backends) < count:
            await asyncio.sleep(0)
        for b in self.backends:
            b.unpaused.clear()

    def go_on(self):
        for b in self.backends:
            b.unpaused.set()


def test_the_fake_obeys_the_protocol():
    assert isinstance(ScriptedBackend(FakeCodec(), ["x"]), RolloutBackend)


async def test_ids_go_in_and_one_output_comes_out():
    fleet = Fleet()
    output = await fleet.ask()
    assert output.token_ids == fleet.whole
    assert output.stop_reason is StopReason.EOS


async def test_an_abort_from_elsewhere_is_resumed_with_the_exact_budget():
    fleet = Fleet()
    task = fleet.ask(max_tokens=6)
    await fleet.sampled(2)
    await fleet.servers[0].update_weights(
        WeightUpdate(version=1, kind="arrays", payload=None), mode=PauseMode.ABORT
    )
    output = await task
    assert output.token_ids == fleet.whole[:6]
    assert output.stop_reason is StopReason.LENGTH
    assert output.policy_versions == (0, 0, 1, 1, 1, 1), "each id keeps the version that sampled it"
    assert output.context_digest == digest_ids([*PROMPT, *output.token_ids])
    first, second = fleet.backends[0].requests
    assert second.prompt_ids == first.prompt_ids + output.token_ids[:2]
    assert (first.sampling.max_tokens, second.sampling.max_tokens) == (6, 4)
    assert second.sampling == replace(first.sampling, max_tokens=4)


async def test_an_abort_after_the_last_id_of_the_budget_is_a_full_output():
    class LateAbort(ScriptedBackend):
        async def generate(self, request):
            return replace(await super().generate(request), stop_reason=StopReason.ABORTED)

    fleet = Fleet(backend=LateAbort)
    output = await fleet.ask(max_tokens=3)
    assert output.stop_reason is StopReason.LENGTH
    assert len(output.token_ids) == 3
    assert len(fleet.backends[0].requests) == 1


async def test_the_callers_own_abort_is_final():
    fleet = Fleet()
    task = fleet.ask()
    await fleet.sampled(2)
    assert await fleet.client.abort("r")
    output = await task
    assert output.stop_reason is StopReason.ABORTED
    assert output.token_ids == fleet.whole[:2]
    assert not await fleet.client.abort("r"), "it is over"


async def test_an_abort_before_the_first_id_returns_an_empty_output():
    fleet = Fleet()
    fleet.backends[0].unpaused.clear()
    task = fleet.ask()
    await asyncio.sleep(0)
    await fleet.client.abort("r")
    output = await task
    assert output.token_ids == ()
    assert output.context_digest == digest_ids(PROMPT)


async def test_an_engine_that_aborts_forever_fails_the_request():
    class Quitter(ScriptedBackend):
        async def wait_for_turn(self, request_id):
            self._aborted.add(request_id)

    with pytest.raises(BackendError, match="a new id"):
        await Fleet(backend=Quitter).ask()


async def test_an_interrupted_part_from_another_context_is_caught():
    class Drifting(ScriptedBackend):
        def digest(self, ids):
            return super().digest([9, *ids])

    fleet = Fleet(backend=Drifting)
    task = fleet.ask()
    await fleet.sampled(2)
    await fleet.backends[0].abort("r")
    with pytest.raises(TokenDriftError):
        await task


async def test_a_dead_engines_request_runs_on_another_and_the_session_moves():
    fleet = Fleet(2)
    task = fleet.ask(session_id="s")
    await fleet.sampled(2)
    fleet.backends[0].die()
    fleet.go_on()
    assert (await task).token_ids == fleet.whole
    assert [s.name for s in fleet.client.pool.servers] == ["s1"]
    await fleet.ask("r2", session_id="s")
    assert [r.request_id for r in fleet.backends[1].requests] == ["r", "r2"]


async def test_without_another_server_the_death_is_the_answer():
    fleet = Fleet()
    fleet.backends[0].die()
    with pytest.raises(EngineDiedError):
        await fleet.ask()
    with pytest.raises(BackendError, match="no server"):
        await fleet.ask()


async def test_a_closed_server_is_left_too():
    fleet = Fleet(2)
    await fleet.servers[0].backend.close()
    assert (await fleet.ask()).token_ids == fleet.whole
    await fleet.servers[1].backend.close()
    with pytest.raises(BackendClosedError):
        await fleet.ask()


async def test_a_removed_servers_requests_move_on_with_their_ids():
    fleet = Fleet(2)
    task = fleet.ask(session_id="s")
    await fleet.sampled(3)
    removed = await fleet.client.pool.remove_server("s0")
    fleet.go_on()
    assert removed is fleet.servers[0]
    assert (await task).token_ids == fleet.whole
    assert fleet.backends[1].requests[0].prompt_ids == (*PROMPT, *fleet.whole[:3])


async def test_a_server_added_while_running_takes_its_share():
    fleet = Fleet(2)
    client = LLMServerClient([fleet.servers[0]])
    fleet.backends[0].unpaused.clear()
    sampling = SamplingParams(max_tokens=100)
    held = asyncio.create_task(client.generate("held", prompt_ids=PROMPT, sampling_params=sampling))
    await asyncio.sleep(0)
    client.pool.add_server(fleet.servers[1])
    await client.generate("next", prompt_ids=PROMPT, sampling_params=sampling)
    assert [r.request_id for r in fleet.backends[1].requests] == ["next"]
    fleet.backends[0].unpaused.set()
    await held


@pytest.mark.parametrize("announced", [True, False])
async def test_a_session_that_ended_may_go_anywhere(announced):
    fleet = Fleet(2)
    await fleet.ask("r1", session_id="s", session_ends=announced)
    if not announced:
        fleet.client.end_session("s")
    fleet.backends[0].unpaused.clear()
    held = fleet.ask("held")
    await asyncio.sleep(0)
    await fleet.ask("r2", session_id="s")
    assert [[r.request_id for r in b.requests] for b in fleet.backends] == [["r1", "held"], ["r2"]]
    fleet.go_on()
    await held


async def test_a_request_id_is_used_once_at_a_time():
    fleet = Fleet()
    first = fleet.ask()
    await asyncio.sleep(0)
    with raises(BackendError, key="'r'", value="running already"):
        await fleet.ask()
    await first
    await fleet.ask()


async def test_images_for_a_text_engine_are_refused():
    with raises(BackendError, value="['image']"):
        await Fleet().ask(image_data=["pixels"])


async def test_cancelling_the_caller_frees_the_engine():
    fleet = Fleet()
    task = fleet.ask()
    await fleet.sampled(1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert fleet.servers[0].running == frozenset()


async def test_weights_reach_every_server_and_kept_requests_go_on_under_them():
    fleet = Fleet(2)
    tasks = [fleet.ask("r0"), fleet.ask("r1")]
    await fleet.sampled(4)
    await fleet.client.pool.update_weights(WeightUpdate(version=7, kind="arrays", payload=None))
    assert [b.policy_version for b in fleet.backends] == [7, 7]
    for output in await asyncio.gather(*tasks):
        assert output.token_ids == fleet.whole
        assert set(output.policy_versions) == {0, 7}
    assert all(len(b.requests) == 1 for b in fleet.backends), "KEEP aborts nothing"


async def test_refused_weights_leave_the_server_serving():
    fleet = Fleet()
    with pytest.raises(WeightUpdateError):
        await fleet.client.pool.update_weights(WeightUpdate(version=0, kind="arrays", payload=None))
    assert (await fleet.ask()).token_ids[-1] == EOS


async def test_a_server_that_dies_of_an_update_leaves_the_others():
    fleet = Fleet(2)
    fleet.backends[0].die()
    await fleet.client.pool.update_weights(WeightUpdate(version=1, kind="arrays", payload=None))
    assert [s.name for s in fleet.client.pool.servers] == ["s1"]
    fleet.backends[1].die()
    with pytest.raises(BackendError, match="no server is"):
        await fleet.client.pool.update_weights(WeightUpdate(version=2, kind="arrays", payload=None))
    assert fleet.client.pool.policy_version == 1
    assert not fleet.client.pool.servers


async def test_a_server_that_refuses_what_another_took_is_lost():
    async def refuse(update):
        raise WeightUpdateError("refused")

    fleet = Fleet(2)
    fleet.backends[0].update_weights = refuse
    await fleet.client.pool.update_weights(WeightUpdate(version=1, kind="arrays", payload=None))
    assert [s.name for s in fleet.client.pool.servers] == ["s1"]
    assert fleet.client.pool.policy_version == 1
    assert fleet.client.stats().servers_lost == 1


def reading_fleet(count=1, **options):
    """A fleet whose client can read text."""
    fleet = Fleet(count, **options)
    fleet.client = LLMServerClient(fleet.servers, decode_text=fleet.codec.decode)
    return fleet


async def interrupted(fleet, *, num_tokens, stop, **fields):
    """The output of a request with a stop string that is aborted after so many ids, and resumed."""
    sampling = SamplingParams(max_tokens=100, seed=3, stop=stop)
    task = asyncio.ensure_future(
        fleet.client.generate("r", prompt_ids=PROMPT, sampling_params=sampling, **fields)
    )
    await fleet.sampled(num_tokens)
    await fleet.servers[0].update_weights(
        WeightUpdate(version=1, kind="arrays", payload=None), mode=PauseMode.ABORT
    )
    return await task


@pytest.mark.parametrize(
    ("stop", "num_ids"),
    [("two three", 3), ("o t", 3), ("one two three four", 4), ("three", 3), ("one three", 8)],
)
async def test_a_stop_string_across_an_interruption_is_seen(stop, num_ids):
    fleet = reading_fleet()
    output = await interrupted(fleet, num_tokens=2, stop=("never", stop))
    assert output.token_ids == fleet.whole[:num_ids]
    assert len(output.log_probs) == len(output.policy_versions) == num_ids
    assert output.context_digest == digest_ids([*PROMPT, *output.token_ids])
    ended = (StopReason.STOP, stop) if num_ids < 8 else (StopReason.EOS, None)
    assert (output.stop_reason, output.stop_match) == ended


async def test_an_engine_that_ends_with_its_own_reason_at_the_same_id_keeps_it():
    fleet = reading_fleet(script=["one two"])
    fleet.client = LLMServerClient(
        fleet.servers, decode_text=lambda ids: "".join("xyz"[i - 2] for i in ids)
    )
    output = await interrupted(fleet, num_tokens=2, stop=("zx",))
    assert output.stop_reason is StopReason.EOS
    assert output.stop_match is None
    assert len(output.token_ids) == 3


async def test_a_drifting_engine_is_not_hidden_by_the_cut():
    class Drifts(ScriptedBackend):
        def digest(self, ids):
            return "other" if len(ids) > len(PROMPT) + 2 else super().digest(ids)

    with pytest.raises(TokenDriftError):
        await interrupted(reading_fleet(backend=Drifts), num_tokens=2, stop=("two three",))


async def test_an_interrupted_request_with_stop_strings_needs_a_client_that_reads():
    with raises(BackendError, fix="decode_text"):
        await interrupted(Fleet(), num_tokens=2, stop=("two three",))


async def test_a_server_of_other_weights_is_refused_until_it_is_up_to_date():
    fleet = Fleet(2)
    client = LLMServerClient([fleet.servers[0]])
    update = WeightUpdate(version=3, kind="arrays", payload=None)
    await client.pool.update_weights(update)
    with raises(ValueError, key="'s1'", value=("version 0", "[3]"), fix="bring it up to date"):
        client.pool.add_server(fleet.servers[1])
    assert client.pool.servers == (fleet.servers[0],)
    await fleet.servers[1].update_weights(update)
    client.pool.add_server(fleet.servers[1])
    assert len(client.pool.servers) == 2


async def test_no_server_is_added_in_the_middle_of_an_update():
    fleet = Fleet(2)
    client = LLMServerClient([fleet.servers[0]])
    fleet.backends[0].unpaused.clear()
    held = asyncio.ensure_future(
        client.generate("r", prompt_ids=PROMPT, sampling_params=SamplingParams(max_tokens=100))
    )
    await asyncio.sleep(0)
    update = WeightUpdate(version=1, kind="arrays", payload=None)
    updating = asyncio.ensure_future(client.pool.update_weights(update, mode=PauseMode.WAIT))
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="while weights are"):
        client.pool.add_server(fleet.servers[1])
    fleet.go_on()
    await asyncio.gather(held, updating)


async def test_a_trajectorys_next_turn_goes_before_those_that_began_later():
    fleet = Fleet()
    for name, session in (("old-1", "old"), ("new-1", "new"), ("old-2", "old")):
        await fleet.ask(name, session_id=session)
    first, later, again = (request.priority for request in fleet.backends[0].requests)
    assert first == again < later


class Streams(ScriptedBackend):
    """Tells every id as it samples it."""

    async def stream(self, request):
        plan, start = self._plan(request)
        self.requests.append(request)
        for sampled in range(request.sampling.max_tokens):
            await self.wait_for_turn(request.request_id)
            token = plan[len(request.prompt_ids) - start + sampled]
            self.sampled += 1
            part = {
                "token_ids": (token,),
                "log_probs": (-0.5,),
                "policy_versions": (self._version,),
            }
            yield TokenChunk(**part)
        raise AssertionError("the tests end it before")


async def test_what_a_lost_server_had_streamed_is_continued_and_streamed_once():
    fleet = Fleet(2)
    fleet.backends[0] = lost = Streams(fleet.codec, [WORDS])
    lost.share_plans(fleet.backends[1])
    fleet.servers[0].backend = lost
    heard = []
    task = fleet.ask(max_tokens=6, on_ids=heard.extend)
    await fleet.sampled(2)
    lost.die()
    fleet.go_on()
    output = await task
    assert output.token_ids == tuple(heard) == fleet.whole[:6]
    assert output.context_digest == digest_ids([*PROMPT, *output.token_ids])
    (continued,) = fleet.backends[1].requests
    assert continued.prompt_ids == (*PROMPT, *fleet.whole[:2])
    assert continued.sampling.max_tokens == 4


async def test_an_abandoned_server_lets_go_of_its_requests():
    fleet = Fleet(2)
    fleet.backends[0].unpaused.clear()
    task = fleet.ask()
    await asyncio.sleep(0)
    assert fleet.servers[0].running
    fleet.servers[0].abandon("it does nothing")
    assert (await task).token_ids == fleet.whole
    assert fleet.client.stats().servers_lost == 1
    assert not fleet.servers[0].running
    with pytest.raises(EngineDiedError, match="it does nothing"):
        await fleet.servers[0].update_weights(WeightUpdate(version=1, kind="arrays", payload=None))


async def test_a_server_that_is_lost_twice_at_once_costs_no_request():
    fleet = Fleet(2)
    fleet.backends[0].unpaused.clear()
    task = fleet.ask()
    await asyncio.sleep(0)
    fleet.servers[0].abandon("it does nothing")
    await asyncio.sleep(0)  # its request is about to notice
    fleet.servers[0].abandon("it left")
    with raises(EngineDiedError, key="server s0", value="it does nothing"):
        await fleet.servers[0].update_weights(WeightUpdate(version=1, kind="arrays", payload=None))
    assert (await task).token_ids == fleet.whole


async def test_tokens_of_weights_that_should_have_been_replaced_are_counted():
    class Forgetful(ScriptedBackend):
        async def update_weights(self, update):
            await super().update_weights(update)
            self.said = self._version
            self._version = 0

        @property
        def policy_version(self):
            return getattr(self, "said", 0)

    fleet = Fleet(2)
    fleet.servers[0].backend = Forgetful(fleet.codec, [WORDS])
    await fleet.client.pool.update_weights(WeightUpdate(version=1, kind="arrays", payload=None))
    await asyncio.gather(fleet.ask("r0", max_tokens=3), fleet.ask("r1", max_tokens=4))
    assert fleet.client.stats().stale_served == 3
    assert (fleet.client.stats().servers_up, fleet.client.stats().servers_joined) == (2, 0)
