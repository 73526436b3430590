"""The command as a user starts it, with the real compiler; in a process of its own, so that no
other test meets it.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import wait_for_end
from tests.unit.deploy.plan.recipe import recipe

pytest.importorskip("libtpu", reason="pip install 'jax_agent_rl[plan]'")


def plan(file: Path, topology: str, *arguments: str) -> subprocess.CompletedProcess:
    """Runs it, without what the tests say to JAX."""
    command = [
        sys.executable,
        "-m",
        "jax_agent_rl.cli",
        "plan",
        "--config",
        str(file),
        "--topology",
        topology,
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=500, env=environment
    )


@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_a_small_run_is_compiled_for_a_slice_and_fits(topology, tmp_path):
    result = plan(recipe(tmp_path), topology, "--json", "--plot", str(tmp_path / "memory.png"))
    assert result.returncode == 0, result.stderr
    assert "It fits" in result.stderr
    printed = json.loads(result.stdout)
    assert printed["fits"]
    assert printed["chips"] == 4
    programs = {program["name"]: program for program in printed["programs"]}
    gradient = programs["policy gradient"]
    decode = programs["decode 4 slots of 128"]
    assert gradient["exchanged"]["fsdp"] > 0
    assert gradient["exchanged"]["tensor"] > 0
    assert set(decode["exchanged"]) == {"tensor"}
    # Two engines of two chips share 8 slots: each has 4 contexts of 128 positions, of each a key
    # and a value; 2 layers, one head a chip, 32 numbers of 4 bytes.
    assert decode["memory"]["KV cache"] >= 2 * 2 * 4 * 128 * 32 * 4
    # Both together: two operations for each number of two layers and the head, and attention's four
    # for each of four heads of 32 numbers, 128 positions and two layers.
    matrices = 2 * (128 * (128 + 64 + 64 + 128) + 3 * 128 * 256) + 256 * 128
    assert decode["flops"] == 2 * 4 * decode["steps"] * (2 * matrices + 4 * 4 * 32 * 128 * 2)
    assert printed["step"]["seconds"] > 0
    assert (tmp_path / "memory.png").stat().st_size > 0


def test_engines_on_all_chips_of_one_host_of_several_are_compiled(tmp_path):
    """The chips of the first host are 0, 1, 4 and 5, which libtpu does not take for a program of
    four chips.
    """
    result = plan(
        recipe(tmp_path),
        "v5e:4x4",
        "learner.mesh.fsdp=8",
        "rollout.jetstream.mesh.tensor=4",
        "--json",
    )
    assert result.returncode == 0, result.stderr
    printed = json.loads(result.stdout)
    assert [mesh["tensor"] for mesh in printed["meshes"]["engines"]] == [4] * 4
    (decode,) = [program for program in printed["programs"] if program["name"].startswith("decode")]
    assert set(decode["exchanged"]) == {"tensor"}
    kinds = {"policy parameters", "policy optimizer", "engine weights", "KV cache"}
    assert all(decode["memory"][kind] > 0 for kind in kinds), "on the learner's chips, too"


def test_copies_on_several_slices_exchange_gradients_between_them(tmp_path):
    critic = ["algorithm.adv_estimator=gae", "algorithm.kl.where=loss"]
    result = plan(recipe(tmp_path), "2*v5e:2x2", "learner.mesh.data=2", "--json", *critic)
    assert result.returncode == 0, result.stderr
    printed = json.loads(result.stdout)
    assert len(printed["meshes"]["engines"]) == 2, "both hosts sample"
    programs = {program["name"]: program for program in printed["programs"]}
    assert {"critic gradient", "critic update", "values", "score"} < programs.keys()
    assert "reference" in programs["decode 4 slots of 128"]["memory"]
    between = {
        name: sent
        for name, sent in programs["policy gradient"]["exchanged"].items()
        if "data" in name
    }
    # At the least a quarter of the parameters, as each chip holds them, in 4 bytes, and back.
    assert sum(between.values()) >= 360_000 / 4 * 4


def test_a_search_compiles_layouts_and_plans_the_best_of_those_that_fit(tmp_path):
    result = plan(
        recipe(tmp_path), "v5e:2x2", "--search", "--budget", "1", "--json", "learner.remat=full"
    )
    assert result.returncode == 0, result.stderr
    (layout,) = [line for line in result.stderr.splitlines() if line.startswith("layout: ")]
    printed = json.loads(result.stdout)
    (tried,) = printed["searched"]
    assert tried["fits"]
    assert layout == f"layout: {' '.join(tried['overrides'])}"
    assert f"the first, as overrides: {' '.join(tried['overrides'])}" in result.stderr
    assert (printed["fits"], printed["step"]["seconds"]) == (True, tried["seconds"])
    meshes = {
        "learner.mesh": printed["meshes"]["learner"],
        "rollout.jetstream.mesh": printed["meshes"]["engines"][0],
    }
    chosen = {f"{key}.{axis}={size}" for key, mesh in meshes.items() for axis, size in mesh.items()}
    changed = {change for change in tried["overrides"] if ".mesh." in change}
    assert changed and changed <= chosen, (changed, chosen)
    assert result.stderr.count("It fits") == 1, "the report of the best only"


def test_a_compiler_that_ends_its_process_is_a_message(tmp_path):
    command = [sys.executable, "-m", "jax_agent_rl.cli", "plan", "--config", str(recipe(tmp_path))]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*command, "--topology", "v5e:2x2"], stdout=pipe, stderr=pipe, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        while "compiling" not in process.stdout.readline():
            assert process.poll() is None
        (compiler,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(compiler), signal.SIGKILL)
        said = process.stderr.read()
    assert process.returncode == 2
    assert said.startswith("error: planning was killed (SIGKILL) when it was compiling")
    assert "where memory runs out" in said
    assert "Traceback" not in said


def test_whoever_ends_the_command_ends_its_compiler(tmp_path):
    command = [sys.executable, "-m", "jax_agent_rl.cli", "plan", "--config", str(recipe(tmp_path))]
    with subprocess.Popen(
        [*command, "--topology", "v5e:2x2"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        while "tracing" not in process.stdout.readline():
            assert process.poll() is None
        (compiler,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
    wait_for_end(int(compiler))


def test_what_does_not_fit_is_said_with_the_key_to_change(tmp_path):
    external = "rollout.jetstream.engine_factory=pkg.module:make"
    result = plan(
        recipe(tmp_path),
        "v5e:2x2",
        "rollout.jetstream.kv_cache_tokens=40000000",
        external,
        "--json",
    )
    assert result.returncode == 1, result.stderr
    assert f"{external}: planned as if it were the built-in engine" in result.stderr
    advised = [line for line in result.stderr.splitlines() if " not fit: " in line]
    (line,) = [line for line in advised if "decode 8 slots of 128" in line]
    assert "write to the cache" in line
    assert "rollout.jetstream.kv_cache_tokens=20000000" in line
    assert len({line.partition("; try ")[2] for line in advised}) == len(advised), (
        "the same is not said twice"
    )
    printed = json.loads(result.stdout)
    assert not printed["fits"]


@pytest.mark.parametrize(
    ("topology", "overrides", "words"),
    [
        ("v5e:3x5", [], "v5e comes as 1x1, 2x2, 2x4,"),
        ("v5e:4x4", [], "learner.mesh takes 4 of 16 devices"),
        ("2*v5e:2x2", ["learner.mesh.fsdp=4"], "set learner.mesh.data to a multiple of 2"),
        (
            "v5p:4x4x4",
            ["learner.mesh.tensor=32"],
            "make each axis a product of the slice's dimensions",
        ),
        (
            "v5e:2x2",
            ["learner.mesh.fsdp=3", "learner.mesh.tensor=1"],
            "the next 3 of this slice are not a block",
        ),
        (
            "v5e:2x2",
            ["rollout.jetstream.mesh.tensor=8"],
            "rollout.jetstream.mesh takes 8 devices from number 0 on",
        ),
        ("v5e:2x2", ["trainer.mode=fully_async"], "both exchange data over the same 2 devices"),
    ],
)
def test_a_slice_that_does_not_go_with_the_run_is_refused_with_the_fix(
    topology, overrides, words, tmp_path
):
    result = plan(recipe(tmp_path), topology, *overrides)
    assert result.returncode == 2
    assert words in result.stderr
