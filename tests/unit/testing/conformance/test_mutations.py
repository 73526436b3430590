"""The conformance suite finds what it is for: each deliberately broken backend is caught by the
check that is meant.
"""

import asyncio
import importlib
import re
import sys
from dataclasses import replace

import numpy as np
import pytest

from jax_agent_rl.errors import BackendError, ConfigError
from jax_agent_rl.testing.conformance.client import CheckFailed
from jax_agent_rl.testing.conformance.models import log_softmax
from jax_agent_rl.testing.conformance.runner import run_suite
from jax_agent_rl.types import PauseMode, RoutedExperts, StopReason, digest_ids
from jax_agent_rl.utils.packages import install_command
from tests.messages import raises
from tests.toy_backend import (
    EOS,
    IMAGE,
    MODELS,
    PER_TOKEN,
    VOCAB,
    ToyBackend,
    ToyModel,
    toy_subject,
)


class DropsEos(ToyBackend):
    def finish(self, run, reason):
        if reason is StopReason.EOS:
            run.ids.pop(), run.log_probs.pop(), run.versions.pop()
        super().finish(run, reason)


class CallsEosLength(ToyBackend):
    def reason(self, run):
        return StopReason.LENGTH if super().reason(run) is StopReason.EOS else super().reason(run)


class RawLogprobs(ToyBackend):
    def sample(self, run):
        token, _ = super().sample(run)
        plain = replace(
            run.request,
            sampling=replace(run.request.sampling, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0),
        )
        return token, float(self.distribution(replace(run, request=plain))[token])


class UntruncatedLogprobs(ToyBackend):
    def sample(self, run):
        token, _ = super().sample(run)
        untruncated = replace(
            run.request, sampling=replace(run.request.sampling, top_p=1.0, top_k=0, min_p=0.0)
        )
        return token, float(self.distribution(replace(run, request=untruncated))[token])


class ZeroGreedyLogprobs(ToyBackend):
    def sample(self, run):
        token, log_prob = super().sample(run)
        return token, 0.0 if run.request.sampling.temperature == 0 else log_prob


class ScoresTheNextPosition(ToyBackend):
    async def score(self, token_ids, *, start=1, top_k=0):
        scores = await super().score(token_ids, start=start, top_k=top_k)
        return replace(scores, log_probs=(*scores.log_probs[1:], 0.0))


class RanksTheLeastLikely(ToyBackend):
    async def score(self, token_ids, *, start=1, top_k=0):
        scores = await super().score(token_ids, start=start, top_k=top_k)
        return replace(scores, top_ids=tuple(ids[::-1] for ids in scores.top_ids))


class IgnoresSeed(ToyBackend):
    def sample(self, run):
        run.seed = self._metrics.generated_tokens
        return super().sample(run)


class OneSeedForAll(ToyBackend):
    def sample(self, run):
        run.seed = 7
        return super().sample(run)


class OneTooMany(ToyBackend):
    def reason(self, run):
        sampling = replace(run.request.sampling, max_tokens=run.request.sampling.max_tokens + 1)
        return super().reason(replace(run, request=replace(run.request, sampling=sampling)))


class LosesPartials(ToyBackend):
    def finish(self, run, reason):
        if reason is StopReason.ABORTED:
            run.ids = []
            run.log_probs = []
            run.versions = []
        super().finish(run, reason)


class LabelsAtTheEnd(ToyBackend):
    def output(self, run, reason):
        return replace(super().output(run, reason), policy_versions=(self._version,) * len(run.ids))


class VersionWithoutWeights(ToyBackend):
    async def update_weights(self, update):
        model = self.model
        await super().update_weights(update)
        self.model = model


class MixesWeights(ToyBackend):
    async def update_weights(self, update):
        old = self.model
        await super().update_weights(update)
        mixed = ToyModel("base")
        mixed.last = self.model.last
        mixed.before = old.before
        self.model = mixed


class ForgetsWhatIsNotNamed(ToyBackend):
    async def update_weights(self, update):
        await super().update_weights(
            replace(update, payload="other", partial=False) if update.partial else update
        )


class LeaksSlot(ToyBackend):
    def forget(self, run):
        if len(run.ids) and run.request.sampling.max_tokens > len(run.ids):
            return  # only a request that ended by itself gives its slot back
        super().forget(run)


class KeepsPrefixCache(ToyBackend):
    async def reset_prefix_cache(self):
        return None


class GoesOnWhilePaused(ToyBackend):
    async def pause(self, mode):
        return None


class AbortsOnWait(ToyBackend):
    async def pause(self, mode):
        await super().pause(PauseMode.ABORT if mode is PauseMode.WAIT else mode)


class TakesStaleWeights(ToyBackend):
    async def update_weights(self, update):
        self._version = min(self._version, update.version - 1)
        await super().update_weights(update)


class TakesAnyWeights(ToyBackend):
    async def update_weights(self, update):
        self._version = update.version


class WaitsOnForNobody(ToyBackend):
    async def pause(self, mode):
        await asyncio.shield(asyncio.create_task(super().pause(mode)))

    async def resume(self):
        self.frozen = False
        self._changed.set()


class WaitsForTheFrozen(ToyBackend):
    async def pause(self, mode):
        while mode is PauseMode.WAIT and self.running:
            await asyncio.sleep(0)
        await super().pause(mode)


class AddsBos(ToyBackend):
    def output(self, run, reason):
        digest = digest_ids([1, *run.request.prompt_ids, *run.ids])
        return replace(super().output(run, reason), context_digest=digest)


class ReversesPriorities(ToyBackend):
    def chunks(self, request):
        return super().chunks(replace(request, priority=-request.priority))


class TruncatesPrompt(ToyBackend):
    def chunks(self, request):
        return super().chunks(replace(request, prompt_ids=request.prompt_ids[-150:]))


class CountsInBytes(ToyBackend):
    def sample(self, run):
        np.array(
            [run.request.sampling.top_k, *run.request.sampling.stop_token_ids], np.int8
        )  # ends the engine's task
        return super().sample(run)


class CutsStopString(ToyBackend):
    def finish(self, run, reason):
        if reason is StopReason.STOP:
            run.ids.pop(), run.log_probs.pop(), run.versions.pop()
        super().finish(run, reason)


class HangsAtClose(ToyBackend):
    async def close(self):
        self.closed = True
        self.frozen = True


class LeavesAThread(ToyBackend):
    async def start(self):
        import threading

        await super().start()
        threading.Thread(
            target=threading.Event().wait, args=(20,), name="toy-worker", daemon=True
        ).start()


class CrossesAnswers(ToyBackend):
    """Every sixth step of a full batch reads the context of its neighbour."""

    def sample(self, run):
        neighbours = list(self.running.values())
        if (
            len(neighbours) == self.capabilities.max_concurrent
            and self._metrics.generated_tokens % 6 == 0
        ):
            return super().sample(neighbours[neighbours.index(run) - 1])
        return super().sample(run)


class Seeing(ToyBackend):
    def __init__(self, **options):
        super().__init__(**{"multi_modal": frozenset({"image"})} | options)


class SeesNothing(Seeing):
    def images(self, run):
        return []


class ForgetsTheOrder(Seeing):
    def images(self, run):
        return sorted(super().images(run))


class TakesOthersImages(Seeing):
    """The first images shown in a context are taken for all that follow in it."""

    def images(self, run):
        self.first = getattr(self, "first", {})
        return self.first.setdefault(run.request.prompt_ids, super().images(run))


class ComparesIdsAlone(Seeing):
    def key(self, run, count):
        return (*run.request.prompt_ids, *run.ids)[:count]


class CountsNothing(Seeing):
    def check_request(self, request):
        super().check_request(
            replace(
                request,
                prompt_ids=tuple(i for i in request.prompt_ids if i != IMAGE),
                multi_modal={},
            )
        )


class Adapting(ToyBackend):
    """Serves the suite's adapter."""

    def __init__(self):
        super().__init__(lora=True)


class IgnoresMinP(ToyBackend):
    def distribution(self, run):
        plain = replace(run.request, sampling=replace(run.request.sampling, min_p=0.0))
        return super().distribution(replace(run, request=plain))


class KeepsOneMore(ToyBackend):
    def distribution(self, run):
        sampling = run.request.sampling
        wider = replace(sampling, top_k=sampling.top_k + 1) if sampling.top_k else sampling
        return super().distribution(replace(run, request=replace(run.request, sampling=wider)))


class ReportsNoSupports(ToyBackend):
    def kept(self, run):
        return super().kept(run)[:0]


class ReportsAllIds(ToyBackend):
    def kept(self, run):
        return np.full_like(super().kept(run), 0xFFFFFFFF)


class ReportsSupportsOfThePreviousId(ToyBackend):
    def kept(self, run):
        previous = replace(run, ids=run.ids[:-1]) if run.ids else run
        return super().kept(previous)


class ReportsBitsBackwards(ToyBackend):
    def kept(self, run):
        return super().kept(run).byteswap()


class LosesSupportsWhenAborted(ToyBackend):
    def output(self, run, reason):
        output = super().output(run, reason)
        return replace(output, supports=()) if reason is StopReason.ABORTED else output


class StreamsNoSupports(ToyBackend):
    async def chunks(self, request):
        async for chunk in super().chunks(request):
            yield replace(chunk, supports=())


class Constrained(ToyBackend):
    """Follows the suite's one grammar: words of so many letters."""

    def __init__(self, **options):
        super().__init__(grammars=True, **options)

    def check_request(self, request):
        super().check_request(request)
        if request.sampling.grammar and not self.bounds(request):
            raise BackendError("not a grammar")

    def bounds(self, request):
        match = re.fullmatch(r"start: /\[a-z\]\{(\d+),(\d+)\}/", request.sampling.grammar)
        return match and (int(match[1]), int(match[2]))

    def allowed(self, run):
        min_length, max_length = self.bounds(run.request)
        ids = np.arange(VOCAB)
        return np.where(ids == EOS, len(run.ids) >= min_length, len(run.ids) < max_length)

    def distribution(self, run):
        free = super().distribution(run)
        if run.request.sampling.grammar is None:
            return free
        return log_softmax(np.where(self.allowed(run), free, -np.inf)[None])[0]


class Marking(Constrained):
    """Says which ids a grammar constrained, but not what it left."""

    def __init__(self):
        super().__init__(sampling_replay=False)

    def output(self, run, reason):
        marks = (run.request.sampling.grammar is not None,) * len(run.ids)
        return replace(super().output(run, reason), constrained=marks)


class ReportsUnmaskedSupports(Constrained):
    def kept(self, run):
        free = replace(
            run, request=replace(run.request, sampling=replace(run.request.sampling, grammar=None))
        )
        return super().kept(free)


class IgnoresGrammars(Constrained):
    def allowed(self, run):
        return np.ones(VOCAB, bool)


class ForgetsMarks(Marking):
    def output(self, run, reason):
        return replace(super().output(run, reason), constrained=())


class UnmaskedLogprobs(Constrained):
    def sample(self, run):
        token, log_prob = super().sample(run)
        free = replace(
            run, request=replace(run.request, sampling=replace(run.request.sampling, grammar=None))
        )
        return token, (
            log_prob
            if run.request.sampling.grammar is None
            else float(self.distribution(free)[token])
        )


class TakesAnyGrammar(Constrained):
    def bounds(self, request):
        return super().bounds(request) or (1, 1)


class Routing(ToyBackend):
    """Reports the experts of the toy model; those of a prompt that is cached are kept beside it."""

    def __init__(self):
        super().__init__(routed_experts=True)
        self.kept: dict[tuple, np.ndarray] = {}

    def routed(self, run):
        """The choices [T, L, k] of all positions fed."""
        scores = self.weights(run).router_scores(run.context[:-1])
        return np.argsort(-scores, axis=-1)[..., :PER_TOKEN].astype(np.uint8)

    def output(self, run, reason):
        start = run.request.routed_experts_prompt_start
        reported = RoutedExperts.of(start, self.routed(run)[start:])
        return replace(super().output(run, reason), routed_experts=reported)


class ReportsTheNextPosition(Routing):
    def routed(self, run):
        return np.roll(super().routed(run), -1, axis=0)


class ReversesLayers(Routing):
    def routed(self, run):
        return super().routed(run)[:, ::-1]


class KeepsStaleExperts(Routing):
    def routed(self, run):
        chosen = super().routed(run)
        prompt = run.request.prompt_ids
        chosen[: len(prompt)] = self.kept.setdefault(prompt, chosen[: len(prompt)].copy())
        return chosen


class LosesExpertsOfReusedPrefixes(Routing):
    def routed(self, run):
        chosen = super().routed(run)
        chosen[: run.cached] = 0
        return chosen


class IgnoresTheStart(Routing):
    def output(self, run, reason):
        start = run.request.routed_experts_prompt_start
        return replace(
            super().output(run, reason), routed_experts=RoutedExperts.of(start, self.routed(run))
        )


class CountsExpertsFromTheResumption(Routing):
    def routed(self, run):
        return super().routed(run)[run.request.resumed :]


class RoutesAsItsNeighbour(Routing):
    def routed(self, run):
        neighbour = next(
            (
                neighbour
                for neighbour in self.running.values()
                if len(neighbour.context) > len(run.context)
            ),
            run,
        )
        return super().routed(neighbour)[: len(run.context) - 1]


class AdaptsNobody(Adapting):
    def weights(self, run):
        return self.model


class AdaptsItsNeighbours(Adapting):
    def weights(self, run):
        return super().weights(
            next((neighbour for neighbour in self.running.values() if neighbour.request.lora), run)
        )


class ServesAnyAdapterPlain(Adapting):
    def check_request(self, request):
        super().check_request(replace(request, lora=None))


class SharesKVOverAdapters(Adapting):
    def key(self, run, count):
        return super().key(replace(run, request=replace(run.request, lora=None)), count)


class ForgetsAdaptedKV(Adapting):
    def key(self, run, count):
        return (*super().key(run, count), run.request.request_id if run.request.lora else "")


CAUGHT_BY = [
    (AdaptsNobody, "adapters"),
    (AdaptsItsNeighbours, "adapters"),
    (ServesAnyAdapterPlain, "adapters"),
    (SharesKVOverAdapters, "adapters-and-prefixes"),
    (ForgetsAdaptedKV, "adapters-and-prefixes"),
    (SeesNothing, "images-condition-output"),
    (ForgetsTheOrder, "images-condition-output"),
    (TakesOthersImages, "images-condition-output"),
    (TakesOthersImages, "images-and-prefixes"),
    (ComparesIdsAlone, "images-and-prefixes"),
    (CountsNothing, "images-miscounted-refused"),
    (DropsEos, "eos-kept"),
    (CallsEosLength, "eos-kept"),
    (RawLogprobs, "logprobs-temperature"),
    (UntruncatedLogprobs, "logprobs-top-p"),
    (UntruncatedLogprobs, "logprobs-top-k"),
    (ZeroGreedyLogprobs, "greedy-logprobs"),
    (IgnoresSeed, "seeds-reproduce"),
    (OneSeedForAll, "seeds-reproduce"),
    (OneSeedForAll, "unseeded-differ"),
    (OneTooMany, "max-tokens-exact"),
    (LosesPartials, "abort-returns-partials"),
    (LosesPartials, "pause-abort"),
    (LabelsAtTheEnd, "update-in-flight"),
    (VersionWithoutWeights, "update-in-flight"),
    (VersionWithoutWeights, "weights-round-trip"),
    (MixesWeights, "weights-take-effect"),
    (ForgetsWhatIsNotNamed, "partial-update"),
    (LeaksSlot, "cancellation-frees-slot"),
    (KeepsPrefixCache, "weights-take-effect"),
    (KeepsPrefixCache, "prefix-reuse"),
    (GoesOnWhilePaused, "pause-keep"),
    (AbortsOnWait, "pause-wait"),
    (WaitsOnForNobody, "pause-wait-given-up"),
    (WaitsForTheFrozen, "pause-wait-after-keep"),
    (TakesStaleWeights, "stale-version-refused"),
    (TakesAnyWeights, "bad-weights-refused"),
    (AddsBos, "ids-in-ids-out"),
    (CountsInBytes, "extreme-values-are-isolated"),
    (ReversesPriorities, "priorities"),
    (TruncatesPrompt, "prompt-too-long"),
    (CutsStopString, "stop-strings"),
    (CutsStopString, "stop-token-ids"),
    (HangsAtClose, "close-ends-everything"),
    (LeavesAThread, "close-ends-everything"),
    (CrossesAnswers, "concurrency-64"),
    (IgnoresGrammars, "grammars"),
    (ForgetsMarks, "grammars"),
    (ReportsUnmaskedSupports, "grammars"),
    (IgnoresMinP, "logprobs-min-p"),
    (KeepsOneMore, "replay-top-k"),
    (ReportsNoSupports, "replay-supports"),
    (ReportsAllIds, "replay-supports"),
    (ReportsSupportsOfThePreviousId, "replay-supports"),
    (ReportsBitsBackwards, "replay-supports"),
    (LosesSupportsWhenAborted, "replay-abort"),
    (StreamsNoSupports, "replay-chunks"),
    (UnmaskedLogprobs, "grammars"),
    (TakesAnyGrammar, "wrong-grammars-refused"),
    (ReportsTheNextPosition, "experts-match-reference"),
    (ReversesLayers, "experts-match-reference"),
    (RoutesAsItsNeighbour, "experts-match-reference"),
    (LosesExpertsOfReusedPrefixes, "experts-of-a-next-turn"),
    (IgnoresTheStart, "experts-of-a-next-turn"),
    (CountsExpertsFromTheResumption, "experts-survive-an-abort"),
    (KeepsStaleExperts, "experts-of-new-weights"),
    (ScoresTheNextPosition, "scores-match-reference"),
    (RanksTheLeastLikely, "scores-match-reference"),
]


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch):
    """The timeouts are as short as the correct backend passes with."""
    import jax_agent_rl.testing.conformance.client as client
    import jax_agent_rl.testing.conformance.runner as runner
    import jax_agent_rl.testing.conformance.suite.test_control as control

    monkeypatch.setattr(control, "SETTLE_SECONDS", 0.5)
    monkeypatch.setattr(runner, "CLEAN_UP_SECONDS", 1.0)
    until = client.CheckClient.until
    monkeypatch.setattr(
        client.CheckClient, "until", lambda self, *a, **k: until(self, *a, **k | {"seconds": 2.0})
    )


@pytest.mark.parametrize(
    ("broken", "check"), CAUGHT_BY, ids=lambda x: x if isinstance(x, str) else x.__name__
)
def test_a_broken_backend_is_caught_with_the_reason(broken, check):
    kind = next(
        kind
        for kind in (Seeing, Adapting, Marking, Constrained, Routing, ToyBackend)
        if issubclass(broken, kind)
    )
    honest = run_suite(toy_subject(kind), only=[check])
    assert [r.outcome for r in honest.results] == ["passed"], honest.results
    (result,) = run_suite(toy_subject(broken, timeout=4.0), only=[check]).results
    assert result.outcome == "failed"
    assert all(word in result.detail for word in ("expected:", "got:", "likely:")), result.detail


def test_what_is_not_declared_is_skipped_by_name():
    def modest():
        return ToyBackend(prefix_reuse=False, pause_modes=frozenset(), weight_payloads=frozenset())

    report = run_suite(toy_subject(modest))
    skipped = {r.check: r.detail for r in report.results if r.outcome == "skipped"}
    assert report.ok
    assert skipped["prefix-reuse"] == "Capabilities.prefix_reuse is False"
    assert skipped["pause-wait"] == "Capabilities.pause_modes does not hold 'wait'"
    assert "weights-round-trip" in skipped
    assert "seeds-reproduce" not in skipped


def test_a_backend_that_dies_is_replaced_and_the_suite_goes_on():
    class Fragile(ToyBackend):
        def check_request(self, request):
            if max(request.prompt_ids) >= 61:
                self._task.cancel()
            super().check_request(request)

    report = run_suite(
        toy_subject(Fragile, timeout=3.0), only=["bad-ids-refused", "prompt-too-long"]
    )
    assert [r.outcome for r in report.results] == ["failed", "passed"]


def test_without_pytest_the_suite_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytest", None)
    monkeypatch.delitem(sys.modules, run_suite.__module__)
    with pytest.raises(ConfigError, match=re.escape(install_command("conformance"))):
        importlib.import_module(run_suite.__module__)


def test_a_backend_that_does_not_start_raises_its_error():
    class Broken(ToyBackend):
        async def start(self):
            raise BackendError("no device")

    with pytest.raises(BackendError, match="no device"):
        run_suite(toy_subject(Broken))


def test_an_unknown_check_is_refused():
    with pytest.raises(ConfigError, match="nonsense"):
        run_suite(toy_subject(ToyBackend), only=["nonsense"])


def test_every_check_states_its_rule():
    results = run_suite(toy_subject(ToyBackend)).results
    assert len(results) == 58
    assert all(result.claim.endswith(".") for result in results)


def test_a_failure_says_what_was_expected_what_came_and_why():
    text = str(CheckFailed("ids", expected=3, got=4, cause="off by one"))
    assert text.splitlines() == ["ids", "  expected: 3", "  got:      4", "  likely:   off by one"]


def test_the_toy_weights_differ():
    assert not np.allclose(MODELS["base"].last, MODELS["other"].last)
    assert EOS == 2


def test_a_backend_that_is_not_there_is_a_config_error(tmp_path):
    from jax_agent_rl.testing.conformance.backends import BackendOptions, select_backend
    from jax_agent_rl.testing.conformance.models import ModelDirs

    options = BackendOptions(folders=ModelDirs(base=tmp_path, scratch=tmp_path))
    with raises(ConfigError, fix=("jetstream", "ray", "remote", "vllm")):
        select_backend("jetsream", options)
    with pytest.raises(ConfigError, match="not available"):
        select_backend("no_such_package:subject", options)
