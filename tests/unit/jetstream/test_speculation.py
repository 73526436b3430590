"""Speculative decoding samples what plain decoding does, with all programs, and stops where it does
not pay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from jax_agent_rl.jetstream import verification
from jax_agent_rl.jetstream.cpu import kernels as cpu_kernels
from jax_agent_rl.jetstream.drafting import Draft, LookupDrafter
from jax_agent_rl.jetstream.engine import EngineShapes, JaxEngine
from jax_agent_rl.jetstream.programs import ProgramTable
from jax_agent_rl.jetstream.request import Counters, RunningRequest
from jax_agent_rl.jetstream.scheduler import Scheduler
from jax_agent_rl.jetstream.speculation import LOSS_SECONDS, LOSS_SHARE, Speculation
from jax_agent_rl.jetstream.verification import accepted_ids
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.types import SamplingParams, StopReason, TokenOutput
from tests.driven_engine import finished
from tests.tiny import EXPERTS, LATENT, TINY, full_logits, logprobs_of, tiny_adapter, tiny_params

SHAPES = EngineShapes(
    max_model_len=96,
    max_concurrent_decodes=3,
    kv_cache_tokens=288,
    decode_steps=4,
    prefill_buckets=(32,),
)
PROMPTS = [
    np.random.default_rng(i).integers(3, TINY.vocab_size, n).tolist()
    for i, n in enumerate((20, 31, 12))
]
COUNT = 30  # contexts grow over page boundaries
KERNELS = [
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(
            cpu_kernels.kernels_digest() is None, reason="no C++ compiler on this machine"
        ),
    ),
    "xla",
]


@functools.cache
def table(*engine: object) -> ProgramTable:
    """Compiled once for all tests of an engine."""
    return ProgramTable()


class Eager(Speculation):
    """Verifies whatever is drafted, however long it takes: by its clock nothing does, so that it
    never pauses.
    """

    def __init__(self, engine: JaxEngine, drafter: Any, counters: Counters) -> None:
        super().__init__(engine, drafter, counters, clock=lambda: 0.0)

    def best_columns(self, plain: float, chances: Sequence[float]) -> int | None:
        return self.most_columns if len(chances) else None


@dataclass
class Known:
    """Drafts what plain decoding sampled, with every ``wrong``-th id of a context replaced."""

    outputs: dict[str, TokenOutput]
    wrong: int = 5

    def propose(self, runs: Sequence[RunningRequest], count: int) -> list[Draft]:
        drafts = []
        for run in runs:
            begin = len(run.token_ids)
            known = self.outputs[run.request.request_id].token_ids[begin : begin + count]
            ids = [
                3 + token % 7 if place % self.wrong == 0 else token
                for place, token in enumerate(known, begin + 1)
            ]
            drafts.append(Draft(ids, ["known"] * len(ids)))
        return drafts

    def observe(self, run: RunningRequest, new: int) -> None:
        pass


def scheduler(
    kernels: str,
    max_drafts: int = 0,
    drafter=None,
    shapes: EngineShapes = SHAPES,
    config=TINY,
    **options,
):
    shapes = replace(shapes, num_speculative_tokens=max_drafts)
    engine = JaxEngine(
        config,
        shapes,
        program_table=table(kernels, shapes, config, *options),
        use_cpu_kernels=kernels == "cpu",
        **options,
    )
    on = Scheduler(
        engine, engine.load_params(tiny_params(config=config)), version=1, decode_text=text
    )
    if max_drafts:
        on.speculation = Eager(engine, drafter or LookupDrafter(), on.counters)
    return on


def text(ids: Sequence[int]) -> str:
    return "".join(chr(0x100 + i) for i in ids)


def submit(on: Scheduler, number: int, *, name: str = "", **sampling) -> None:
    chosen = {
        "max_tokens": COUNT,
        "temperature": 0.7,
        "seed": number,
        "ignore_eos": True,
    } | sampling
    lora = chosen.pop("lora", None)
    request = GenerateRequest(
        request_id=name or str(number),
        prompt_ids=tuple(PROMPTS[number]),
        sampling=SamplingParams(**chosen),
        lora=lora,
    )
    on.submit(request)


def plain_outputs(
    kernels: str = "xla", config=TINY, options=(), **sampling
) -> dict[str, TokenOutput]:
    on = scheduler(kernels, config=config, **dict(options))
    for number in range(3):
        submit(on, number, **sampling)
    return finished(on)


def assert_same(outputs: dict[str, TokenOutput], wanted: dict[str, TokenOutput]) -> None:
    for name, output in wanted.items():
        assert outputs[name].token_ids == output.token_ids
        assert outputs[name].stop_reason == output.stop_reason
        assert outputs[name].stop_match == output.stop_match
        assert outputs[name].context_digest == output.context_digest
        np.testing.assert_allclose(outputs[name].log_probs, output.log_probs, atol=2e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("kernels", KERNELS)
def test_ids_are_those_of_plain_decoding_and_log_probs_those_of_full_passes(
    kernels: str, temperature: float
):
    wanted = plain_outputs(temperature=temperature)
    on = scheduler(kernels, 6, Known(wanted))
    for number in range(3):
        submit(on, number, temperature=temperature)
    outputs = finished(on)
    assert_same(outputs, wanted)
    for number, prompt in enumerate(
        PROMPTS[:2]
    ):  # the third grows beyond what a full pass is compiled for
        ids = outputs[str(number)].token_ids
        exact = logprobs_of(tiny_params(), prompt, ids, temperature or 1.0)
        np.testing.assert_allclose(outputs[str(number)].log_probs, exact, atol=2e-4)
    metrics = on.metrics()
    assert metrics.accepted_tokens > 50
    assert metrics.draft_tokens > metrics.accepted_tokens > metrics.drafts


@pytest.mark.parametrize("kernels", KERNELS)
def test_siblings_and_later_samples_draft_for_each_other(kernels: str):
    on = scheduler(kernels, 6)
    for number in range(3):
        submit(on, number)
    first = finished(on)
    earlier_metrics = on.metrics()
    for number in range(3):
        submit(on, number)
    assert_same(finished(on), first)
    new_metrics = on.metrics().since(earlier_metrics)
    assert new_metrics.accepted_tokens > 60
    assert new_metrics.accepted_tokens == new_metrics.draft_tokens


FIRST = 2
DRAWS = 1800


def chi_squared(on: Scheduler) -> dict[str, float]:
    """Compare first ids, and second ones after the draft and after another id, with the model's
    distributions.
    """
    prompt = PROMPTS[2]
    draft, second_likeliest = np.argsort(full_logits(tiny_params(), prompt)[-1])[::-1][:2].tolist()
    on.speculation = Eager(on.engine, AlwaysDrafts(draft), on.counters)
    for seed in range(DRAWS):
        submit(on, 2, name=str(seed), seed=seed, max_tokens=FIRST, temperature=1.5)
    pairs = [output.token_ids for output in finished(on).values()]
    assert on.metrics().drafts > 0.9 * DRAWS, "plain decoding would be right whatever the rule"
    return {
        "first": deviation(prompt, [first for first, _ in pairs]),
        "after the draft": deviation(
            [*prompt, draft], [second for first, second in pairs if first == draft]
        ),
        "after another": deviation(
            [*prompt, second_likeliest],
            [second for first, second in pairs if first == second_likeliest],
        ),
    }


def deviation(context: list[int], drawn: list[int]) -> float:
    """Return chi-squared of ids that were drawn after a context: of its four likeliest ids, and all
    others.
    """
    chances = model_chances(context)
    likely = np.argsort(chances)[::-1][:4]
    expected = np.append(chances[likely], 1 - chances[likely].sum()) * len(drawn)
    counts = [drawn.count(i) for i in likely.tolist()]
    assert len(drawn) > 100
    assert expected.min() > 4
    return float(((np.append(counts, len(drawn) - sum(counts)) - expected) ** 2 / expected).sum())


def model_chances(context: list[int]) -> np.ndarray:
    scores = full_logits(tiny_params(), context)[-1].astype(np.float64) / 1.5
    return np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()


@dataclass
class AlwaysDrafts:
    token: int

    def propose(self, runs: Sequence[RunningRequest], count: int) -> list[Draft]:
        return [Draft([self.token], ["fixed"]) for _ in runs]

    def observe(self, run: RunningRequest, new: int) -> None:
        pass


def test_drafts_know_the_random_numbers_of_the_engine():
    on = scheduler("xla", 3)
    drafter = LookupDrafter()
    on.speculation = Eager(on.engine, drafter, on.counters)
    for seed in range(30):
        submit(on, 2, name=str(seed), seed=seed)
    finished(on)
    tokens = [draw.token for draw in drafter.index.draws_after(PROMPTS[2])]
    assert len(tokens) >= 30
    assert tokens == sorted(tokens)
    assert len(set(tokens)) > 3


BOUND = 23.5  # chi-squared of 4 degrees of freedom exceeds it once in 10,000


def test_the_distribution_is_the_models():
    distances = chi_squared(scheduler("xla", 3))
    assert max(distances.values()) < BOUND, distances


def accepts_always(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(verification, "accepted_ids", lambda draft, drawn: len(draft))


def accepts_by_a_coin_without_taking_the_rest(patch: pytest.MonkeyPatch) -> None:
    """Takes a drafted id with probability min(1, p / q), where q = 1, and otherwise draws from p,
    not from the rest.
    """
    accepts_always(patch)
    verify = JaxEngine.verify
    chance = float(model_chances(PROMPTS[2]).max())
    coin = np.random.default_rng(0)

    def wrong(self, params, cache, slots, drafts):
        cache, drawn = verify(self, params, cache, slots, drafts)
        for slot, draft in enumerate(drafts):
            if draft and (coin.random() < chance or drawn.ids[0, slot] == draft[0]):
                drawn.ids[0, slot] = draft[0]
            else:
                drawn.ids[1:, slot] = -1
        return cache, drawn

    patch.setattr(JaxEngine, "verify", wrong)


def takes_one_more_than_it_accepts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        verification,
        "accepted_ids",
        lambda draft, drawn: min(len(draft), 1 + accepted_ids(draft, drawn)),
    )


WRONG_RULES: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    accepts_always: "after another",
    accepts_by_a_coin_without_taking_the_rest: "first",
    takes_one_more_than_it_accepts: "after another",
}


@pytest.mark.parametrize("rule", WRONG_RULES, ids=lambda rule: rule.__name__)
def test_the_test_of_the_distribution_catches_a_wrong_rule(
    rule: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
):
    rule(monkeypatch)
    distances = chi_squared(scheduler("xla", 3))
    assert distances[WRONG_RULES[rule]] > BOUND, distances


@pytest.mark.parametrize("kernels", KERNELS)
def test_stops_and_limits_inside_an_accepted_run_end_it(kernels: str):
    plain_ids = plain_outputs()["0"].token_ids
    cases = {
        "string": {"stop": (text(plain_ids[9:11]),)},
        "id": {"stop_token_ids": (plain_ids[12],)},
        "limit": {"max_tokens": 11},
    }
    for case in cases.values():
        outputs = []
        for on in (scheduler(kernels), scheduler(kernels, 6, Known(plain_outputs(), wrong=99))):
            submit(on, 0, **case)
            outputs.append(finished(on))
        assert_same(outputs[1], outputs[0])
        assert len(outputs[1]["0"].token_ids) < 14
        assert on.metrics().accepted_tokens > 5


@pytest.mark.parametrize("kernels", KERNELS)
def test_rejected_positions_of_an_aborted_request_are_never_read(kernels: str):
    wanted = plain_outputs()
    on = scheduler(kernels, 6, Known(wanted, wrong=2))
    submit(on, 0)
    for _ in range(3):
        on.step()
    ended = on.abort("0")
    assert ended is not None
    assert ended[1].final is not None
    ids = ended[1].final.token_ids
    assert ended[1].final.stop_reason is StopReason.ABORTED
    assert ids == wanted["0"].token_ids[: len(ids)]
    assert ids
    submit(on, 0)  # continues in the cache of the aborted one
    assert_same(finished(on), {"0": wanted["0"]})


@pytest.mark.parametrize("kernels", KERNELS)
def test_weights_that_change_between_dispatches_are_those_of_the_next_ids(kernels: str):
    drafted = scheduler(kernels, 6, Known(plain_outputs()))
    submit(drafted, 0)
    drafted.step()
    drafted.step()
    sampled = len(next(iter(drafted.running.values())).token_ids)
    single = scheduler(kernels, shapes=replace(SHAPES, decode_steps=1))
    submit(single, 0)
    for _ in range(sampled):
        single.step()
    for on in (drafted, single):
        on.set_weights(on.engine.load_params(tiny_params(1)), 2)
    drafted_outputs = finished(drafted)
    single_outputs = finished(single)
    assert_same(drafted_outputs, single_outputs)
    assert (
        drafted_outputs["0"].policy_versions
        == single_outputs["0"].policy_versions
        == (1,) * sampled + (2,) * (COUNT - sampled)
    )
    assert 1 < sampled < COUNT


def test_who_is_preempted_samples_what_it_would_have():
    wanted = plain_outputs()
    on = scheduler("xla", 6, Known(wanted), replace(SHAPES, kv_cache_tokens=160))
    for number in range(3):
        submit(on, number)
    outputs = finished(on)
    assert_same(outputs, wanted)
    assert sum(output.num_preempted for output in outputs.values()) > 0


@pytest.mark.parametrize("kernels", KERNELS)
def test_experts_are_those_of_plain_decoding(kernels: str):
    wanted = plain_outputs(kernels, EXPERTS)
    on = scheduler(kernels, 6, Known(wanted), config=EXPERTS)
    for number in range(3):
        submit(on, number)
    outputs = finished(on)
    assert_same(outputs, wanted)
    for name, output in wanted.items():
        assert output.routed_experts is not None
        assert outputs[name].routed_experts == output.routed_experts


def test_latents_are_verified_as_they_are_decoded():
    wanted = plain_outputs("xla", LATENT)
    on = scheduler("xla", 6, Known(wanted), config=LATENT)
    for number in range(3):
        submit(on, number)
    assert_same(finished(on), wanted)


@pytest.mark.parametrize("kernels", KERNELS)
def test_each_request_keeps_its_adapter(kernels: str):
    options = {"adapters": {"a": tiny_adapter()}}
    outputs = []
    for max_drafts in (0, 6):
        on = scheduler(kernels, max_drafts, Known(outputs[0]) if max_drafts else None, **options)
        for number, lora in enumerate((None, "a", None)):
            submit(on, number, lora=lora)
        outputs.append(finished(on))
    assert_same(outputs[1], outputs[0])
    assert outputs[0]["1"].token_ids != plain_outputs(kernels)["1"].token_ids
    assert on.metrics().accepted_tokens > 30


def test_a_restricted_request_decodes_plainly_and_so_do_those_beside_it():
    on = scheduler("xla", 6)
    for _ in range(2):
        submit(on, 0, top_p=0.9)
        submit(on, 1)
        outputs = finished(on)
    assert on.metrics().drafts == 0
    assert len(outputs["0"].supports) == COUNT


@pytest.mark.parametrize("kernels", KERNELS)
def test_nothing_is_compiled_after_warm_up(kernels: str):
    shapes = replace(SHAPES, max_model_len=64, kv_cache_tokens=192, num_speculative_tokens=6)
    engine = JaxEngine(TINY, shapes, use_cpu_kernels=kernels == "cpu", compile_ahead=True)
    on = Scheduler(engine, engine.load_params(tiny_params()))
    on.cache = engine.warm_up(on.params, on.cache)
    on.speculation = Eager(engine, LookupDrafter(), on.counters)
    for _ in range(2):
        for number in range(3):
            submit(on, number)
        finished(on)
    assert on.metrics().drafts > 0
    assert on.metrics().recompilations == 0


@dataclass
class FakeEngine:
    """An engine whose clock advances by what its programs take."""

    plain: float
    verified: float
    shapes: EngineShapes = field(
        default_factory=lambda: replace(SHAPES, num_speculative_tokens=4, decode_steps=16)
    )
    compile_seconds: float = 0.0
    now: float = 0.0
    columns: list[int] = field(default_factory=lambda: [16])

    @property
    def program_table(self) -> FakeEngine:
        return self

    def width(self, count: int) -> int:
        return 2

    def verified_columns(self, count: int) -> list[int]:
        return self.columns

    def run(self, on: Speculation, run: RunningRequest, accepted: int) -> int:
        """Run one dispatch, of which a verification gets ``accepted`` ids more; return its ids."""
        drafts = on.choose([run])
        if drafts is None:
            count = on.steps
            self.now += self.plain * count
        else:
            count = 1 + accepted
            self.now += self.verified
        for _ in range(count):
            run.token_ids.append(5)
        on.observe(run, count)
        on.measure([count])
        return count


@dataclass
class SlowDrafter:
    """Drafts, right or wrong, and takes its time."""

    engine: FakeEngine
    token: int
    seconds: float = 0.0

    def propose(self, runs: Sequence[RunningRequest], count: int) -> list[Draft]:
        self.engine.now += self.seconds
        return [Draft([self.token] * count, ["fixed"] * count)]

    def observe(self, run: RunningRequest, new: int) -> None:
        pass


def policy(engine: FakeEngine, **drafter) -> tuple[Speculation, RunningRequest]:
    request = GenerateRequest(
        request_id="a", prompt_ids=(5,), sampling=SamplingParams(max_tokens=10**6, temperature=1.0)
    )
    run = RunningRequest(request, max_tokens=10**6, eos_ids=frozenset(), seed=0, decode_text=None)
    on = Speculation(
        engine,  # type: ignore[arg-type]
        SlowDrafter(engine, **drafter),
        Counters(),
        clock=lambda: engine.now,
    )
    return on, run


def tokens_per_second(
    engine: FakeEngine, on: Speculation, run: RunningRequest, *, accepted: int
) -> float:
    count = sum(engine.run(on, run, accepted) for _ in range(3000))
    return count / engine.now


def test_drafts_that_are_right_are_verified():
    engine = FakeEngine(plain=0.05, verified=0.06)
    assert tokens_per_second(engine, *policy(engine, token=5), accepted=4) > 0.95 * 5 / 0.06


@pytest.mark.parametrize("case", [(0.05, 0.05, 6, 0), (0.05, 0.5, 5, 4), (0.05, 0.2, 6, 0)])
def test_where_it_does_not_pay_it_costs_what_it_may(case: tuple[float, float, int, int]):
    plain, verified, token, accepted = case
    engine = FakeEngine(plain, verified)
    speed = tokens_per_second(
        engine, *policy(engine, token=token, seconds=0.004), accepted=accepted
    )
    allowed = LOSS_SHARE + (LOSS_SECONDS + 10 * verified) / engine.now
    assert speed > (1 - 1.1 * allowed) / plain


def test_more_columns_are_tried_only_if_they_could_pay_at_the_growth_of_those_measured():
    engine = FakeEngine(plain=0.05, verified=0.0)
    on, run = policy(engine, token=5)
    for columns, seconds in ((4, 0.06), (8, 0.15)):  # more than twice as long for twice as many
        engine.columns = [columns]
        engine.verified = seconds
        for _ in range(6):
            engine.run(on, run, 4)

    engine.columns = [4, 8, 16]
    assert on.choose([run]) is not None
    chances = [0.9] * 15
    assert on.best_columns(0.05, chances) == 4
    engine.columns = [4, 16]  # four times as many might be little more
    assert on.best_columns(0.05, chances) == 16


def test_seconds_of_compilation_count_for_nothing():
    engine = FakeEngine(plain=0.05, verified=0.06)
    on, run = policy(engine, token=5)
    for _ in range(6):
        engine.run(on, run, 4)
    assert on.choose([run]) is not None
    engine.now += 60.0
    engine.compile_seconds += 59.9
    on.measure([5])
    assert on.choose([run]) is not None


def test_a_plain_step_is_measured_again_from_time_to_time():
    engine = FakeEngine(plain=0.05, verified=0.06)
    on, run = policy(engine, token=5)
    for _ in range(200):
        engine.run(on, run, 4)
    engine.plain = 0.001
    count = sum(engine.run(on, run, 4) for _ in range(600))
    assert count
    assert on.choose([run]) is None
