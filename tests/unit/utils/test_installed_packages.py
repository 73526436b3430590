"""``examples/plugin_package``, installed by pip and used: one thing of each kind, by its name
alone.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from jax_agent_rl.agents import agent_names, get_agent
from jax_agent_rl.cli import app
from jax_agent_rl.config import ToolsConfig, build
from jax_agent_rl.environments import get_environment
from jax_agent_rl.environments.users.base import InteractionRegistry
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.observe.run_dir import read_records
from jax_agent_rl.rewards.registry import find_reward
from jax_agent_rl.rollout.protocol import RolloutBackend
from jax_agent_rl.testing.conformance.backends import BackendOptions, select_backend
from jax_agent_rl.testing.conformance.models import ModelDirs
from jax_agent_rl.tools.registry import open_tools
from jax_agent_rl.utils.plugins import KINDS, installed
from tests.messages import raises
from tests.tiny_run import tiny_recipe

PACKAGE = Path(__file__).parents[3] / "examples" / "plugin_package"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, as pip installs it without a network."""
    folder = tmp_path_factory.mktemp("installed")
    shutil.copytree(PACKAGE, folder / "source")  # a build writes into its source
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    subprocess.run([*command, "--target", folder / "target", folder / "source"], check=True)
    return folder / "target"


@pytest.fixture
def plugins(packages: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(packages))
    installed.cache_clear()
    yield
    installed.cache_clear()


def configured(*overrides: str):
    return build({"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t"}}, overrides)


NAMES = [
    "algorithm.adv_estimator=sign",
    "algorithm.policy_loss.loss_mode=plain_gradient",
    "rollout.backend=jax_default",
    "trainer.logger=csv",
    "trace.sinks=[titles]",
]


def test_a_run_uses_every_kind_of_plugin_of_an_installed_package(plugins, tmp_path: Path):
    recipe = tiny_recipe(
        tmp_path,
        trainer={"steps": 2},
        reward={"path": None},
        rollout={"jetstream": {}},
        agent={"max_user_turns": 1},
    )
    for file in tmp_path.glob("*.jsonl"):
        file.write_text(file.read_text().replace('"noise"', '"brevity"'))
    result = CliRunner().invoke(
        app, ["train", str(recipe), "agent.default_agent=double_check", *NAMES]
    )
    assert result.exit_code == 0, result.output
    run = tmp_path / "run"
    records = [r for r in read_records(run / "trajectories.jsonl") if r["split"] == "train"]
    assert {r["agent_name"] for r in records} == {"double_check"}
    assert len({r["reward"] for r in records}) > 2
    steps = [r for r in read_records(run / "metrics.jsonl") if r["kind"] == "step"]
    for step in steps:
        mine = [r for r in records if r["step"] == step["step"]]
        groups = {}
        for r in mine:
            groups.setdefault(r["group_id"], []).append(r["reward"])
        losses = []
        for r in mine:
            expected = np.sign(r["reward"] - np.mean(groups[r["group_id"]]))
            sampled = np.asarray(r["response_mask"], bool)
            assert set(np.asarray(r["advantages"])[sampled]) == {expected}
            losses += list(-expected * np.asarray(r["rollout_logprobs"])[sampled])
        assert step["loss"] == pytest.approx(np.mean(losses), abs=1e-4), (
            "-A log pi, averaged over tokens"
        )
    versions = {version for r in records for version in r["policy_versions"]}
    assert versions - {-1} == {0, 1}, "the backend took the learner's weights"
    rows = [line.split(",") for line in (run / "metrics.csv").read_text().splitlines()]
    assert [float(value) for _, name, value in rows if name == "loss"] == [
        step["loss"] for step in steps
    ]
    traced = {line.split()[0] for line in (run / "titles.txt").read_text().splitlines()}
    assert traced >= {r["trajectory_id"] for r in records}
    assert json.loads((run / "summary.json").read_text())["max_logprob_gap"] < 1e-3


async def test_tools_environments_and_users_are_found_by_name(plugins, tmp_path: Path):
    (tmp_path / "tools.yaml").write_text("tools: [{class_name: population}]")
    async with open_tools(ToolsConfig(tool_config_path=str(tmp_path / "tools.yaml"))) as tools:
        assert list(tools) == ["population"]
        assert tools.select()["population"].parameters["required"] == ["city"]
    environment = get_environment("guess_city")()
    assert environment.name == "guess_city"
    assert "710000" in str((await environment.reset(city="Oslo")).messages)
    entry = "interaction: [{name: t, class_name: tourist, config: {city: Oslo}}]"
    (tmp_path / "users.yaml").write_text(entry)
    users = InteractionRegistry.from_path(str(tmp_path / "users.yaml"))
    assert (
        await users["t"].generate_response("id", [{"role": "assistant", "content": "Oslo"}])
    ).score == 1.0
    reward = find_reward("brevity")
    assert reward is not None and reward.compute_score("x" * 25) == 0.75


def test_the_conformance_suite_takes_a_backend_of_an_installed_package(plugins, tmp_path: Path):
    folder = tiny_recipe(tmp_path).parent / "model"
    subject = select_backend(
        "jax_default", BackendOptions(folders=ModelDirs(base=folder, scratch=tmp_path))
    )
    assert subject.name == "jax_default"
    assert isinstance(subject.make(), RolloutBackend)


def test_installed_losses_may_have_keys_and_the_critic_may_not(plugins):
    config = configured(*NAMES[:2], "algorithm.clip_ratio_low=0.1", "algorithm.gamma=0.9")
    assert config.algorithm.policy_loss.loss_mode == "plain_gradient"
    assert json.loads(config.model_dump_json())["algorithm"]["adv_estimator"] == "sign"
    for refused in ("critic.learning_rate=1e-3", "algorithm.policy_loss.tau_pos=2"):
        with pytest.raises(ConfigError, match="used only with"):
            configured(*NAMES[:2], refused)
    with raises(
        ConfigError, key=("rollout.placement", "rollout.backend"), value=("separate", "jax_default")
    ):
        configured("rollout.backend=jax_default", "rollout.placement=separate")


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("algorithm.adv_estimator=sing", {"fix": ("did you mean 'sign'?", "'grpo'", "or 'sign'")}),
        ("algorithm.policy_loss.loss_mode=plain_gradent", {"fix": "'plain_gradient'"}),
        ("rollout.backend=jetstram", {"fix": "'jetstream'"}),
        ("trainer.logger=[cvs]", {"fix": "'csv'"}),
        ("trace.sinks=[title]", {"fix": ("'titles'", "jax_agent_rl.trace_sinks")}),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_known_one(plugins, override: str, named: dict):
    with raises(ConfigError, **named):
        configured(override)


def test_messages_of_the_registries_suggest_installed_names(plugins, tmp_path: Path):
    assert "double_check" in agent_names()
    with raises(ConfigError, fix="'double_check'"):
        get_agent("double_chek")
    with raises(ConfigError, fix="'guess_city'"):
        get_environment("gues_city")


def fake_package(folder: Path, *, name: str, module: str, code: str, entries: str) -> None:
    information = folder / f"{name.replace('-', '_')}-2.1.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.1\n")
    (information / "entry_points.txt").write_text(entries)
    (folder / f"{module}.py").write_text(code)


@pytest.mark.parametrize(
    ("code", "named"),
    [
        (
            "import not_there",
            {"value": ("'not_there'", ".py:1")},
        ),
        ("Agent = 3", {"value": 3, "fix": "AgentLoop"}),
        ("", {"value": ("AttributeError", "'Agent'")}),
    ],
)
def test_a_broken_package_is_named_where_it_is_used_and_stops_nothing_else(
    code: str, named: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    module = f"broken_{len(code)}"
    entries = f"[jax_agent_rl.agents]\nbroken = {module}:Agent\n"
    fake_package(tmp_path, name="team-x", module=module, code=code, entries=entries)
    monkeypatch.syspath_prepend(str(tmp_path))
    installed.cache_clear()
    try:
        assert get_agent("tool_agent") and "broken" in agent_names()
        with raises(ConfigError, key=(f"broken = {module}:Agent", "team-x 2.1"), **named):
            get_agent("broken")
    finally:
        installed.cache_clear()


def test_two_packages_with_one_name_are_both_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("team-x", "team-y"):
        module = name.replace("-", "_")
        entries = f"[jax_agent_rl.losses]\nsame = {module}:loss\n"
        fake_package(tmp_path, name=name, module=module, code="", entries=entries)
    monkeypatch.syspath_prepend(str(tmp_path))
    installed.cache_clear()
    try:
        with raises(ConfigError, key="'same'", value=("team-x 2.1", "team-y 2.1")):
            configured("algorithm.policy_loss.loss_mode=same")
    finally:
        installed.cache_clear()


def test_a_configuration_without_foreign_names_looks_for_no_package():
    installed.cache_clear()
    configured(
        "algorithm.adv_estimator=rloo",
        "trainer.logger=wandb",
        "trace.sinks=[files]",
        "rollout.backend=vllm",
    )
    assert get_agent("tool_agent")
    assert installed.cache_info().misses == 0


def test_the_example_has_one_thing_of_each_kind(plugins):
    assert {kind for kind in KINDS if installed(kind)} == set(KINDS)
