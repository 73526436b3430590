"""A configuration under examination: everything that is wrong is told in one go, each with what to
do.
"""

import json
import re
from collections.abc import Collection
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from jax_agent_rl.config import load
from jax_agent_rl.deploy.doctor.machine import run_checks
from jax_agent_rl.deploy.doctor.run import RunChecks
from tests.dataset_rows import write_twins
from tests.ports import free_port
from tests.tiny_run import tiny_recipe

SCORING = ("user code", "data.train", "rewards")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    return tiny_recipe(tmp_path_factory.mktemp("doctor"))


async def findings(
    recipe: Path, *overrides: str, of: Collection[str] = ()
) -> dict[str, list[tuple[str, str]]]:
    """Return the findings by check, of all checks or of some."""
    by_check: dict[str, list[tuple[str, str]]] = {}
    async with AsyncExitStack() as stack:
        checks = RunChecks(config=load(recipe, overrides), stack=stack).all()
        wanted = [(name, check) for name, check in checks if not of or name in of]
        async for finding in run_checks(wanted, timeout=60):
            by_check.setdefault(finding.check, []).append((str(finding.status), finding.text))
    return by_check


def only(by_check, check: str) -> tuple[str, str]:
    (finding,) = by_check[check]
    return finding


async def test_a_good_configuration_has_nothing_but_ok(recipe):
    told = await findings(recipe)
    assert {status for lines in told.values() for status, _ in lines} == {"ok"}
    assert {
        "model",
        "tokenizer",
        "data.train",
        "data.eval",
        "prompts",
        "rewards",
        "agents",
        "engine",
    } <= told.keys()
    assert "11 rows" in only(told, "data.train")[1]
    assert "noise" in only(told, "rewards")[1]


async def test_several_faults_are_told_together_and_hide_no_other(recipe, tmp_path):
    told = await findings(
        recipe, "data.train=missing.jsonl", f"model.path={tmp_path}", "agent.module=nowhere.py"
    )
    assert only(told, "user code")[0] == "fail"
    assert "nowhere.py" in only(told, "user code")[1]
    assert only(told, "model")[0] == "fail"
    assert "config.json is missing" in only(told, "model")[1]
    assert only(told, "tokenizer")[0] == "fail"
    assert "tokenizer.json is missing" in only(told, "tokenizer")[1]
    assert only(told, "data.train")[0] == "fail"
    assert "missing.jsonl" in only(told, "data.train")[1]
    why = "not checked: the user code, which registers agents, could not be imported"
    assert only(told, "data.eval") == (
        "warn",
        why,
    )  # not a failure for each name that is unknown without it
    assert only(told, "prompts") == ("warn", "not checked: the tokenizer could not be read")
    assert only(told, "run folder") == ("warn", "not checked: the model could not be read")


async def test_prompts_over_the_limit_are_told_by_their_share(recipe):
    status, text = only(await findings(recipe, "agent.max_prompt_length=13"), "prompts")
    assert status == "fail"
    assert "agent.max_prompt_length=13" in text
    assert "%" in text
    assert "raise it to" in text


async def test_shared_memory_is_looked_at_where_weights_pass_through_it(recipe):
    overrides = ["rollout.backend=remote", "rollout.urls=[http://127.0.0.1:1]"]
    in_files = await findings(recipe, *overrides, of=["model", "shared memory"])
    assert "/dev/shm" in only(in_files, "shared memory")[1]
    overrides.append("rollout.weight_transport=jax_transfer")
    pulled = await findings(recipe, *overrides, of=["model", "shared memory"])
    assert pulled.keys() == {"model"}


TOOLS = """
from jax_agent_rl.tools import function_tool

@function_tool
def add(a: int, b: int) -> str:
    '''Add two numbers and write the sum out as a word of the English language.'''
"""


@pytest.mark.parametrize("agent", ["tool_agent", "interaction_agent", "react_agent"])
async def test_prompts_are_counted_with_the_tools_that_they_describe(recipe, tmp_path, agent):
    tools = tmp_path / "tools.py"
    tools.write_text(TOOLS)
    told = {}
    for prompt in ("template", "none"):
        overrides = [
            f"tools.function_tool_path={tools}",
            f"agent.default_agent={agent}",
            f"agent.tool_prompt={prompt}",
        ]
        result = await findings(recipe, *overrides, of=("tools", "tokenizer", "prompts", *SCORING))
        told[prompt] = int(re.search(r"the longest has (\d+) ids", only(result, "prompts")[1])[1])
    assert told["template"] > told["none"]


async def test_a_truth_in_a_column_of_its_own_is_told(recipe, tmp_path):
    rows = tmp_path / "rows.jsonl"
    row = {
        "data_source": "noise",
        "prompt": [{"role": "user", "content": "add"}],
        "ground_truth": "4",
    }
    rows.write_text(json.dumps(row) + "\n")
    result = await findings(recipe, f"data.train={rows}", "data.eval=null", of=SCORING)
    (told,) = [
        text
        for status, text in result["data.train"]
        if status == "warn" and "column ground_truth" in text
    ]
    assert "reward_model" in told
    assert "1 of 1" in told


async def test_a_reward_function_that_fails_on_the_ground_truth_is_told(recipe, tmp_path):
    rows = tmp_path / "rows.jsonl"
    row = {"data_source": "calculator", "prompt": [{"role": "user", "content": "add"}]}
    rows.write_text(
        json.dumps(row | {"reward_model": {"ground_truth": "none"}}) + "\n" + json.dumps(row) + "\n"
    )
    told = await findings(recipe, f"data.train={rows}", "data.eval=null")
    status, text = only(told, "rewards")
    assert status == "fail"
    assert "must hold a number" in text
    assert ("warn", "no reward_model.ground_truth in 1 of 2 rows") in told["data.train"]


async def test_json_lines_and_parquet_are_told_alike(recipe, tmp_path):
    """Rows with columns and fields that others lack; a reward that reads the question."""
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "from jax_agent_rl.rewards import register_reward\n"
        "@register_reward('asked', override=True)\n"
        "def compute_score(solution_str, ground_truth, messages, prompt, level='none'):\n"
        "    assert prompt[0]['content'] == messages[0]['content'] == 'add'\n"
        "    return float(solution_str == f'{ground_truth}' and level == 'none')\n"
    )
    first = {
        "data_source": "asked",
        "prompt": [{"role": "user", "content": "add"}],
        "reward_model": {"ground_truth": 4},
    }
    second = {
        **first,
        "reward_model": {"ground_truth": 4.5},
        "extra_info": {"level": "high"},
        "agent_name": None,
    }
    told = []
    for file in write_twins(tmp_path, [first, second]):
        overrides = (f"data.train={file}", "data.eval=null", f"reward.path={rewards}")
        result = await findings(
            recipe, *overrides, of=("user code", "tokenizer", "prompts", *SCORING)
        )
        without_name = {}
        for check, lines in result.items():
            without_name[check] = [(status, text.replace(str(file), "")) for status, text in lines]
        told.append(without_name)
    assert told[0] == told[1]
    assert "earns 1 as '4'" in only(told[0], "rewards")[1]


def one_row(folder: Path, data_source: str, truth: object, **fields: str) -> str:
    """An override: a file with one row."""
    rows = folder / "rows.jsonl"
    row = {"data_source": data_source, "prompt": [{"role": "user", "content": "add"}], **fields}
    rows.write_text(json.dumps(row | {"reward_model": {"ground_truth": truth}}) + "\n")
    return f"data.train={rows}"


@pytest.mark.parametrize(
    ("data_source", "truth", "expected"),
    [
        ("calculator", "408", "earns 1 as '408'"),
        ("gsm8k", "18", "earns 1 as '#### 18'"),
        ("nq", {"target": ["Paris", "the capital"]}, "earns 1 as '<answer>Paris</answer>'"),
        ("code", '{"tests": ["assert True"]}', "no answer to try it with"),
        ("environment", None, "no answer to try it with"),
    ],
)
async def test_a_ground_truth_is_tried_in_the_form_its_reward_function_wants(
    recipe, tmp_path, data_source, truth, expected
):
    override = one_row(tmp_path, data_source, truth)
    overrides = (override, "data.eval=null", "reward.sandbox=unsafe_local")
    status, text = only(await findings(recipe, *overrides, of=SCORING), "rewards")
    assert status == "ok"
    assert expected in text


async def test_a_reward_that_pays_for_a_bare_answer_alone_is_told(recipe, tmp_path):
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "def compute_score(solution_str, ground_truth):\n"
        "    return float(solution_str == ground_truth)\n"
    )
    overrides = (one_row(tmp_path, "warehouse", "408"), "data.eval=null", f"reward.path={rewards}")
    status, text = only(await findings(recipe, *overrides, of=SCORING), "rewards")
    assert status == "ok"
    assert "earns 1 as '408', and nothing as 'The answer is 408.'" in text


async def test_a_ground_truth_that_earns_nothing_is_told_with_what_to_check(recipe, tmp_path):
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "from jax_agent_rl.rewards import register_reward\n"
        "@register_reward('finals', override=True)\n"
        "def compute_score(solution_str, ground_truth):\n"
        "    return float(solution_str == f'FINAL: {ground_truth}')\n"
    )
    overrides = (one_row(tmp_path, "finals", "408"), "data.eval=null", f"reward.path={rewards}")
    status, text = only(await findings(recipe, *overrides, of=SCORING), "rewards")
    assert status == "warn"
    assert "'408' earns nothing" in text
    assert "<answer>…</answer>" in text
    assert "data_source" in text
    assert "reward_model.ground_truth" in text


async def test_a_reward_that_pays_every_answer_alike_is_told(recipe, tmp_path):
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def compute_score(solution_str):\n    return 1.0\n")
    overrides = (one_row(tmp_path, "warehouse", "408"), "data.eval=null", f"reward.path={rewards}")
    status, text = only(await findings(recipe, *overrides, of=SCORING), "rewards")
    assert status == "warn"
    assert "'I do not know.' earns 1, and its first row's ground truth 1" in text


async def test_rows_that_would_call_no_tool_are_told(recipe):
    told = await findings(recipe, "tools.function_tool_path=jax_agent_rl.tools.calculator")
    assert any(
        s == "warn" and "no agent_name in 11 of 11 rows" in text for s, text in told["data.train"]
    )


async def test_a_tool_server_that_is_not_there_fails_and_other_agents_are_ready(recipe, tmp_path):
    rows = tmp_path / "rows.jsonl"
    row = {
        "data_source": "noise",
        "prompt": [{"role": "user", "content": "add"}],
        "reward_model": {"ground_truth": "1"},
    }
    names = ("server_tool_agent", "single_turn_agent")
    rows.write_text("".join(json.dumps(row | {"agent_name": name}) + "\n" for name in names))
    url = f"http://127.0.0.1:{free_port()}"
    overrides = (f"data.train={rows}", "data.eval=null", f"agent.tool_server_url={url}")
    told = await findings(recipe, *overrides, "agent.tool_call_max_retries=0", "agent.min_turns=1")
    by_agent = dict(text.split(": ", 1) for _, text in told["agents"])
    assert url in by_agent["server_tool_agent"]
    assert by_agent["single_turn_agent"] == "ready"


async def test_each_rollout_server_is_asked(recipe, monkeypatch):
    monkeypatch.setattr("jax_agent_rl.deploy.doctor.run.REMOTE_SECONDS", 0.0)
    gone = f"http://127.0.0.1:{free_port()}"
    told = await findings(recipe, "rollout.backend=remote", f"rollout.urls=[{gone}]")
    assert any(
        status == "fail" and gone in text and "rollout-server" in text
        for status, text in told["engine"]
    )


async def test_a_missing_token_and_vllm_are_told(recipe, monkeypatch):
    monkeypatch.delenv("NO_SUCH_TOKEN", raising=False)
    overrides = ("rollout.backend=remote", f"rollout.urls=[http://127.0.0.1:{free_port()}]")
    monkeypatch.setattr("jax_agent_rl.deploy.doctor.run.REMOTE_SECONDS", 0.0)
    told = await findings(recipe, *overrides, "rollout.token_env=NO_SUCH_TOKEN")
    assert any("export NO_SUCH_TOKEN" in text for _, text in told["engine"])
