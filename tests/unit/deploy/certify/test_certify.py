"""Certification of a tiny model on this CPU: what is injected deviates, under the claim that it
concerns.
"""

from __future__ import annotations

import ctypes
import gc
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from jax_agent_rl.cli import app
from jax_agent_rl.config import load
from jax_agent_rl.deploy.certify import command as certify
from jax_agent_rl.deploy.certify import kernels, report, speed, system
from jax_agent_rl.deploy.certify.command import run_checks, select_checks
from jax_agent_rl.deploy.certify.machine import SHORT, Machine, load_config
from jax_agent_rl.deploy.certify.report import CheckOutcome, CheckResult, Claim
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.jetstream.engine import JaxEngine
from jax_agent_rl.learner.checkpoint import Checkpointer
from jax_agent_rl.testing.conformance import backends
from tests.messages import raises
from tests.simulated import run_on_devices
from tests.tiny_run import tiny_recipe
from tests.toy_backend import ToyBackend, toy_subject
from tests.unit.docs.pages import DOCS, ROOT


class Clock:
    """Moves by a nanosecond with every look, and otherwise when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-9
        return self.now


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_recipe(tmp_path_factory.mktemp("certify"))


@pytest.fixture
def machine(recipe: Path, tmp_path: Path) -> Machine:
    return Machine(load_config(recipe, [], tmp_path, devices=1), tmp_path, clock=Clock())


def test_without_a_configuration_it_is_the_quickstarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        "jax_agent_rl.deploy.certify.machine.fetch_quickstart_model", lambda: Path("model")
    )
    loaded = load_config(None, [], tmp_path, devices=1)
    assert loaded.data.eval is not None
    data = {
        "data.train": loaded.data.train[0].path,
        "data.eval": loaded.data.eval[0].path,
        "model.path": "model",
    }
    paths = [f"{key}={value}" for key, value in (data | {"run_dir": loaded.run_dir}).items()]
    assert loaded == load(
        ROOT / "configs" / "quickstart.yaml", [*paths, *SHORT, "trainer.checkpoint_every=10"]
    )


def run(machine: Machine, name: str) -> CheckResult:
    (result,) = run_checks(machine, select_checks([name]))
    return result


def found(result: CheckResult) -> dict[str, Claim]:
    """The claims of measurements that deviate, by their names."""
    return {
        measurement.name: measurement.claim
        for measurement in result.measurements
        if measurement.deviates
    }


# --- kernels --------------------------------------------------------------------------------------


@pytest.fixture
def few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "HEADS", ())  # the model's, of 16, is left
    monkeypatch.setattr(kernels, "PAGES", (32,))
    monkeypatch.setattr(kernels, "KINDS", ("float32", "int8"))


def test_this_machines_kernels_are_within_their_limits(machine: Machine, few_kernels: None):
    result = run(machine, "kernels")
    assert result.outcome is CheckOutcome.AS_CLAIMED
    assert not result.left_out
    names = {measurement.name for measurement in result.measurements}
    assert {"decode attention, int8 cache", "tree attention, bfloat16: gradients"} <= names


@pytest.mark.parametrize(
    ("where", "name", "broken", "deviating"),
    [
        (
            kernels.attention,
            "chunk_attention",
            lambda out: out * 1.001,
            "attention of prompt chunks, ",
        ),
        (
            kernels.attention,
            "decode_attention",
            lambda out: (out[0].at[0].add(jnp.nan), out[1]),
            "decode attention, ",
        ),
        (kernels, "tree_attention", lambda out: out.at[:, :, 250].set(0), "tree attention, "),
    ],
)
def test_a_wrong_kernel_deviates_and_no_other(
    where: Any,
    name: str,
    broken: Any,
    deviating: str,
    machine: Machine,
    few_kernels: None,
    monkeypatch,
):
    right = getattr(where, name)
    monkeypatch.setattr(
        where, name, lambda *arguments, **options: broken(right(*arguments, **options))
    )
    result = run(machine, "kernels")
    assert result.outcome is CheckOutcome.DEVIATES
    assert set(found(result).values()) == {kernels.CLAIM}
    names = {each for each in found(result) if "gradients" not in each}
    suffix = "" if "tree" in deviating else " cache"
    assert f"{deviating}float32{suffix}" in names
    assert all(each.startswith(deviating) for each in names)


def test_a_wrong_gradient_deviates_though_the_output_is_right(
    machine: Machine, few_kernels: None, monkeypatch
):
    right = kernels.grouped_product

    @jax.custom_vjp
    def product(x, weight, sizes, group):
        return right(x, weight, sizes, group)

    def forward(x, weight, sizes, group):
        out, pull = jax.vjp(lambda x, weight: right(x, weight, sizes, group), x, weight)
        return out, pull

    def backward(pull, d_out):
        d_x, d_weight = pull(d_out)
        return d_x, d_weight.at[2].multiply(0.5), None, None

    product.defvjp(forward, backward)
    monkeypatch.setattr(kernels, "grouped_product", product)
    result = run(machine, "kernels")
    assert set(found(result)) == {
        f"experts' products, {dtype}: gradients" for dtype in ("float32", "bfloat16")
    }
    (gradient,) = [
        gradient
        for gradient in result.measurements
        if gradient.name == "experts' products, float32: gradients"
    ]
    assert gradient.detail.endswith("d matrices")


# --- speed and memory -----------------------------------------------------------------------------


def test_a_slow_engine_deviates_from_its_ideal_time(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
):
    assert run(machine, "speed").outcome is CheckOutcome.AS_CLAIMED
    right = JaxEngine.decode

    def decode(self, *arguments):
        machine.clock.now += 5.0  # type: ignore[attr-defined]
        return right(self, *arguments)

    monkeypatch.setattr(JaxEngine, "decode", decode)
    result = run(machine, "speed")
    assert found(result) == {"decoding, 8 slots of 64": speed.IDEAL}
    assert result.outcome is CheckOutcome.DEVIATES


def test_a_tpu_that_misses_its_prediction_either_way_deviates(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
):
    """The machine poses as a TPU, where the prediction is libtpu's."""
    machine.plan = replace(machine.plan, predicts=True)
    predicted = speed.find_program(machine, "decode").prediction
    assert predicted is not None
    assert predicted.seconds > 3e-9
    result = run(machine, "speed")  # a call takes two looks at the clock: too fast to be true
    assert set(found(result).values()) == {speed.PREDICTED}
    assert "decoding, 8 slots of 64" in found(result)


def test_a_tpu_below_its_documented_peaks_deviates(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(machine, "devices", [SimpleNamespace(device_kind="TPU v5 lite")])
    machine.peaks = {"float32": 0.9 * 197e12, "memory": 0.3 * 819e9}
    assert found(run(machine, "peaks")) == {"reading of memory": speed.PEAKS}


@pytest.mark.parametrize(
    ("share", "outcome"), [(1.1, CheckOutcome.AS_CLAIMED), (1.5, CheckOutcome.DEVIATES)]
)
def test_more_memory_than_planned_deviates(share: float, outcome: CheckOutcome, machine: Machine):
    planned = max(load.total for load in machine.plan.loads)
    machine.devices = [
        SimpleNamespace(id=0, memory_stats=lambda: {"peak_bytes_in_use": share * planned})
    ]
    result = run(machine, "memory")
    assert result.outcome is outcome
    assert set(found(result).values()) <= {speed.MEMORY}
    assert result.measurements[0].references["plan"] == planned


def test_a_cpu_counts_what_learner_and_engine_add_to_the_process(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
):
    assert run(machine, "memory").outcome is CheckOutcome.AS_CLAIMED
    hoard: list[np.ndarray] = []
    right = JaxEngine.init_cache
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier tests freed would take some of it

    def init_cache(self):
        hoard.append(np.ones(1 << 26))  # 512 MiB
        return right(self)

    monkeypatch.setattr(speed, "HOST_SPARE", 1 << 26)
    monkeypatch.setattr(JaxEngine, "init_cache", init_cache)
    assert found(run(machine, "memory")) == {"the process, most in use": speed.MEMORY}


# --- engine and learner, backends -----------------------------------------------------------------


@pytest.fixture
def one_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "PRECISIONS", {"float32": {"dtype": "float32"}})


def test_engine_and_learner_agree(machine: Machine, one_precision: None):
    assert run(machine, "agreement").outcome is CheckOutcome.AS_CLAIMED


def test_a_drifting_engine_deviates(
    machine: Machine, one_precision: None, monkeypatch: pytest.MonkeyPatch
):
    right = system.backend_factories

    def drifting(config, codec, *, weights, **options):
        def drifted():
            model, params = weights()
            return model, params | {"final_norm": params["final_norm"] * 1.02}

        return right(config, codec, weights=drifted, **options)

    monkeypatch.setattr(system, "backend_factories", drifting)
    result = run(machine, "agreement")
    assert found(result) == {f"float32: {gap} gap": system.AGREEMENT for gap in ("mean", "largest")}


def test_a_backend_that_breaks_a_rule_deviates_and_the_rule_is_named(machine: Machine, monkeypatch):
    class RaisesTheTemperature(ToyBackend):
        def sample(self, run):
            token, log_prob = super().sample(run)
            return token, log_prob / 2

    monkeypatch.setattr(system, "is_installed", lambda package: package == "torch")
    right = {
        "jetstream": lambda options: toy_subject(RaisesTheTemperature),
        "remote": lambda options: toy_subject(ToyBackend),
    }
    monkeypatch.setattr(backends, "BACKENDS", right)
    result = run(machine, "conformance")
    assert found(result) == {"jetstream: broken rules": system.CONFORMANCE}
    assert "log-prob" in result.measurements[0].detail
    assert [line.partition(":")[0] for line in result.left_out] == ["ray", "vllm"]


# --- devices --------------------------------------------------------------------------------------

_EXCHANGES = """
import sys, time
from pathlib import Path
import jax
from jax_agent_rl.deploy.certify.command import run_checks, select_checks
from jax_agent_rl.deploy.certify.machine import Machine, load_config
scratch = Path(sys.argv[2])
meshes = ["learner.mesh.fsdp=2", "learner.mesh.tensor=2"]
config = load_config(Path(sys.argv[1]), meshes, scratch, devices=1)
machine = Machine(config, scratch, clock=time.perf_counter)
def show():
    (result,) = run_checks(machine, select_checks(["collectives"]))
    print(result.outcome, *sorted(one.name for one in result.measurements if one.deviates), sep="|")
    return result
names = [one.name for one in show().measurements]
print(len(names), "exchanges over tensor of learner.mesh" in names)
right = jax.lax.ppermute
def wrong(x, axis, ring):
    if axis == "fsdp":
        return 2 * right(x, axis, ring[::-1])
    return right(x, axis, ring)
jax.lax.ppermute = wrong
show()
"""


def test_an_exchange_that_goes_wrong_deviates_on_its_axis(recipe: Path, tmp_path: Path):
    right, names, wrong = run_on_devices(_EXCHANGES, str(recipe), str(tmp_path), devices=4)
    assert right == "as claimed"
    assert names == "14 True"
    assert wrong.split("|") == [
        "deviates",
        "exchanges over fsdp of 4 devices",
        "exchanges over fsdp of learner.mesh",
    ]


def test_one_device_exchanges_nothing(machine: Machine):
    result = run(machine, "collectives")
    assert result.outcome is CheckOutcome.NOT_RUN
    assert "one device" in result.reason


# --- checkpoints and training ---------------------------------------------------------------------


def test_a_checkpoint_that_restores_other_numbers_deviates(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
):
    assert run(machine, "checkpoint").outcome is CheckOutcome.AS_CLAIMED
    right = Checkpointer.restore

    def restore(self, like, **options):
        step, state, notes = right(self, like, **options)
        leaves, tree = jax.tree.flatten(state)
        place = max(range(len(leaves)), key=lambda i: leaves[i].size)
        leaves[place] = jnp.nextafter(leaves[place], jnp.inf)  # by one bit
        return step, jax.tree.unflatten(tree, leaves), notes

    monkeypatch.setattr(Checkpointer, "restore", restore)
    machine.scratch = machine.scratch / "again"
    result = run(machine, "checkpoint")
    assert set(found(result)) == {
        "arrays that differ after restoring",
        "arrays that differ one update later",
    }
    assert set(found(result).values()) == {system.CHECKPOINT}


def test_a_short_run_is_as_claimed(machine: Machine):
    result = run(machine, "training")
    assert result.outcome is CheckOutcome.AS_CLAIMED
    values = {measurement.name: measurement.value for measurement in result.measurements}
    assert values["trajectories unaccounted for"] == 0
    assert values["trajectories trained on"] == 16


SUMMARY = {
    "started": 16,
    "trained": 14,
    "dropped": {"too_long": 2},
    "token_drift": 0,
    "max_logprob_gap": 1e-6,
}
SUMMARY |= {"recompilations_after_warmup": 0, "train_seconds": 3.0, "steps": 2}


@pytest.mark.parametrize(
    ("changed", "claim"),
    [
        ({}, None),
        ({"trained": 13}, system.ACCOUNTING),
        ({"trained": 0, "dropped": {"too_long": 16}}, system.ACCOUNTING),
        ({"token_drift": 1}, system.DRIFT),
        ({"max_logprob_gap": 0.1}, system.AGREEMENT),
        ({"recompilations_after_warmup": 2}, system.COMPILED),
    ],
)
def test_a_run_that_breaks_a_claim_deviates_from_that_claim(
    changed: dict[str, Any], claim: Claim | None, machine: Machine, monkeypatch: pytest.MonkeyPatch
):
    async def train(config, **options):
        return SUMMARY | changed

    monkeypatch.setattr(system, "train", train)
    assert set(found(run(machine, "training")).values()) == ({claim} if claim else set())


# --- the report -----------------------------------------------------------------------------------


def test_a_check_that_raises_is_a_deviation_and_ends_no_other(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
):
    def full(*arguments: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(Checkpointer, "save", full)
    failed, none = run_checks(
        machine, [*select_checks(["checkpoint"]), *select_checks(["collectives"])]
    )
    assert failed.outcome is CheckOutcome.FAILED
    assert failed.reason.startswith("OSError: No space left on device (full, line ")
    assert none.outcome is CheckOutcome.NOT_RUN
    ((text, claim),) = report.deviations([failed.to_json(), none.to_json()])
    assert "No space left" in text
    assert claim == vars(system.CHECKPOINT)


def test_a_part_without_time_is_left_out_and_said_to_be(machine: Machine):
    (check,) = select_checks(["kernels"])
    (result,) = run_checks(machine, [replace(check, seconds=0.0)])
    assert result.outcome is CheckOutcome.MEASURED
    assert not result.measurements
    assert len(result.left_out) > 10
    assert "the 0 s of this check were used up" in result.left_out[0]


def claims() -> list[Claim]:
    claims = [check.claim for check in certify.CHECKS]
    for module in (kernels, speed, system):
        claims += [value for value in vars(module).values() if isinstance(value, Claim)]
    return claims


@pytest.mark.parametrize("claim", claims(), ids=lambda claim: claim.text[:40])
def test_a_claim_stands_on_its_page_word_for_word(claim: Claim):
    def plain(text: str) -> str:
        return re.sub(r"\s+", " ", text)

    assert plain(claim.text) in plain((ROOT / claim.page).read_text())


def test_the_page_lists_every_check():
    rows = re.findall(r"^\| `(\w+)` \|", (DOCS / "certify.md").read_text(), re.M)
    assert rows == [check.name for check in certify.CHECKS]


def test_text_of_others_is_text_on_the_page(machine: Machine):
    hostile = "<script>alert(1)</script>"
    result = replace(run(machine, "collectives"), outcome=CheckOutcome.FAILED, reason=hostile)
    about = machine.describe() | {"device": hostile, "model": hostile}
    record = report.as_json(
        [result], machine=about, command=hostile, date="2026-01-01", seconds=1.0
    )
    text = report.page(record)
    assert "<script" not in text
    assert text.count("&lt;script&gt;") >= 5
    assert "default-src 'none'" in text


def test_an_unknown_check_is_refused_with_the_known_ones():
    with raises(ConfigError, value="nothing", fix=("collectives", "kernels")):
        select_checks(["nothing"])


def test_what_a_machine_ends_is_reported_up_to_there(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def killed(machine: Machine, record: CheckResult) -> None:
        raise SystemExit

    first = select_checks(["collectives"])[0]
    last = replace(select_checks(["peaks"])[0], run=killed)
    monkeypatch.setattr(certify, "CHECKS", (first, last))
    CliRunner().invoke(app, ["certify", "--config", str(recipe), "--out", str(tmp_path / "out")])
    report = json.loads((tmp_path / "out" / "certify.json").read_text())
    assert report["verdict"] == "as claimed, ended before peaks"
    assert not report["ok"]
    assert len(report["checks"]) == 1


@pytest.mark.parametrize("broken", [False, True])
def test_the_command_writes_both_files_and_its_status_tells_of_deviations(
    broken: bool, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if broken:
        monkeypatch.setattr(system, "count_differing", lambda first, second: 1)
    arguments = [
        "certify",
        "--config",
        str(recipe),
        "--only",
        "checkpoint",
        "--out",
        str(tmp_path / "out"),
        "seed=3",
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == broken, result.output
    report = json.loads((tmp_path / "out" / "certify.json").read_text())
    assert report["ok"] is not broken
    assert report["machine"]["model"] == "model"
    html = (tmp_path / "out" / "certify.html").read_text()
    assert ("a resumed run equals one that was never interrupted." in result.output) is broken
    assert ("Deviations" in html) is broken
    assert str(Path.home()) not in json.dumps(report["machine"])
