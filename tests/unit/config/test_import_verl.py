"""verl's scripts become configurations: what a shell would pass is read, and nothing is lost
silently.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_agent_rl.config import build, load
from jax_agent_rl.config.from_verl import as_yaml, import_verl
from jax_agent_rl.config.loading import valid_keys
from jax_agent_rl.config.overrides_script import Override, read_overrides
from jax_agent_rl.config.run import Config
from jax_agent_rl.config.verl_keys import AGENTFLY, DEFAULTS, SAME, VLLM
from jax_agent_rl.errors import ConfigError
from tests.messages import raises
from tests.unit.docs.pages import DOCS

GRPO = r"""
set -x
MODEL=${MODEL:-Qwen/Qwen2-7B-Instruct}
BATCH=$((512 * 2))
DATA=(
    data.train_files=$HOME/gsm8k/train.parquet   # rows
    data.val_files="['$HOME/gsm8k/test.parquet']"
)
python3 -m verl.trainer.main_ppo "${DATA[@]}" \
    algorithm.adv_estimator=grpo data.train_batch_size=$BATCH \
    data.max_prompt_length=512 data.max_response_length=1024 data.truncation='error' \
    actor_rollout_ref.model.path="$MODEL" actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.002 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.n=5 \
    +foo.bar=1 trainer.logger=['console','wandb'] trainer.experiment_name='qwen2' \
    trainer.test_freq=5 trainer.total_epochs=15 $@
"""
MODEL_AND_ROWS = "actor_rollout_ref.model.path=m data.train_files=rows.parquet\n"


def overrides(tmp_path: Path, text: str, name: str = "run.sh"):
    file = tmp_path / name
    file.write_text(text)
    return read_overrides(file)


def test_a_grpo_script_becomes_a_configuration_that_loads(tmp_path: Path):
    imported = import_verl(overrides(tmp_path, GRPO))
    file = tmp_path / "mine.yaml"
    file.write_text(as_yaml(imported))
    config = load(file)
    assert config.model.path == "Qwen/Qwen2-7B-Instruct"
    assert imported.values["data.eval"] == ["~/gsm8k/test.parquet"]
    assert config.rollout.prompts_per_step == 1024
    assert config.rollout.group_size == 5
    assert config.learner.num_minibatches == 4
    assert config.rollout.max_model_len == 1536
    kl = config.algorithm.kl
    assert (kl.where, kl.coef, kl.estimator) == ("loss", 0.002, "k3")
    assert config.rollout.vllm.tensor_parallel_size == 2
    assert config.trainer.eval_every == 5
    assert config.algorithm.clip_ratio_high == 0.2
    assert config.learner.adam_b2 == 0.999
    assert "group_size: 5  # actor_rollout_ref.rollout.n" in file.read_text()


def test_what_is_not_translated_is_listed_with_its_line(tmp_path: Path):
    leftovers = import_verl(overrides(tmp_path, GRPO)).leftovers
    assert leftovers["unknown"] == ["run.sh:16: foo.bar=1"]
    assert [line.split(": ")[0:2] for line in leftovers["choice"]] == [
        ["run.sh:17", "trainer.total_epochs=15"]
    ]
    assert [line.split(": ")[1] for line in leftovers["no meaning"]] == ["data.truncation=error"]


def test_a_reward_file_is_taken_and_another_name_in_it_is_left(tmp_path: Path):
    text = (
        MODEL_AND_ROWS
        + "custom_reward_function.path=my/reward.py custom_reward_function.name=score\n"
    )
    imported = import_verl(overrides(tmp_path, text))
    assert imported.values["reward.path"] == "my/reward.py"
    (leftover,) = imported.leftovers["choice"]
    assert "custom_reward_function.name=score" in leftover
    assert "name the function compute_score" in leftover


def test_one_logger_may_be_named_without_a_list(tmp_path: Path):
    imported = import_verl(overrides(tmp_path, MODEL_AND_ROWS + "trainer.logger=wandb\n"))
    assert imported.values["trainer.logger"] == ["wandb"]
    assert "choice" not in imported.leftovers


def test_a_length_that_is_no_number_is_left(tmp_path: Path):
    imported = import_verl(overrides(tmp_path, MODEL_AND_ROWS + "data.max_prompt_length=abc\n"))
    (leftover,) = imported.leftovers["choice"]
    assert "data.max_prompt_length" in leftover
    assert "'abc'" in leftover


def test_verls_newer_place_of_the_reward_file_is_known(tmp_path: Path):
    text = MODEL_AND_ROWS + "reward.custom_reward_function.path=my/reward.py\n"
    assert import_verl(overrides(tmp_path, text)).values["reward.path"] == "my/reward.py"


def test_a_file_that_the_script_changes_is_asked_for(tmp_path: Path):
    text = f"python -m verl.trainer.main_ppo --config-name='gsm8k_multiturn' {MODEL_AND_ROWS}"
    script = overrides(tmp_path, text)
    (leftover,) = import_verl(script).leftovers["choice"]
    assert leftover.startswith("run.sh:1: --config-name=gsm8k_multiturn: ")
    assert "gsm8k_multiturn.yaml" in leftover
    named = overrides(tmp_path, text.replace("='gsm8k_multiturn'", " gsm8k_multiturn"))
    assert import_verl(named).leftovers["choice"] == [leftover]
    file = overrides(tmp_path, "data: {max_prompt_length: 64}", "gsm8k_multiturn.yaml")
    assert "choice" not in import_verl(file | script).leftovers
    assert (
        "choice"
        not in import_verl(
            overrides(tmp_path, text.replace("gsm8k_multiturn", "ppo_trainer"))
        ).leftovers
    )


def test_rows_for_tools_need_an_agent(tmp_path: Path):
    text = MODEL_AND_ROWS + "actor_rollout_ref.rollout.multi_turn.enable=True\n"
    (leftover,) = import_verl(overrides(tmp_path, text)).leftovers["choice"]
    assert "agent.default_agent=tool_agent" in leftover
    named = text + "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent\n"
    (leftover,) = import_verl(overrides(tmp_path, named)).leftovers["no effect"]
    assert "multi_turn.enable=True: agent.default_agent" in leftover
    off = text.replace("True", "False")
    (leftover,) = import_verl(overrides(tmp_path, off)).leftovers["same"]
    assert "multi_turn.enable=False: rows without an agent_name" in leftover


def test_the_column_of_prompts_has_to_be_renamed(tmp_path: Path):
    assert import_verl(
        overrides(tmp_path, MODEL_AND_ROWS + "data.prompt_key=prompt\n")
    ).leftovers == {"same": ["run.sh:2: data.prompt_key=prompt: the rows' column prompt"]}
    (leftover,) = import_verl(
        overrides(tmp_path, MODEL_AND_ROWS + "data.prompt_key=question\n")
    ).leftovers["choice"]
    assert "rename the rows' column" in leftover


def test_dapo_filters_and_shaping_are_translated(tmp_path: Path):
    text = (
        MODEL_AND_ROWS + "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=16"
        " algorithm.filter_groups.enable=True\nalgorithm.filter_groups.max_num_gen_batches=10"
        " algorithm.filter_groups.metric=acc\nreward_model.overlong_buffer.enable=True"
        " reward_model.overlong_buffer.len=128\ndata.train_batch_size=512"
        " actor_rollout_ref.actor.ppo_mini_batch_size=32\n"
    )
    imported = import_verl(overrides(tmp_path, text))
    algorithm = build(yaml.safe_load(as_yaml(imported))).algorithm
    assert algorithm.filter_zero_variance
    assert algorithm.max_resample_rounds == 9
    assert algorithm.filter_metric == "accuracy"
    assert algorithm.filters_by_accuracy
    assert algorithm.shaping.overlong_buffer == 128
    assert imported.values["learner.num_minibatches"] == 16


@pytest.mark.parametrize("metric", ["score", "seq_reward", "seq_final_reward"])
def test_groups_that_verl_filters_by_their_reward_are_filtered_by_it(tmp_path: Path, metric: str):
    text = (
        MODEL_AND_ROWS
        + f"algorithm.filter_groups.enable=True algorithm.filter_groups.metric={metric}\n"
    )
    imported = import_verl(overrides(tmp_path, text))
    assert imported.values["algorithm.filter_metric"] == "reward"
    assert any(
        "algorithm.max_resample_rounds" in leftover for leftover in imported.leftovers["choice"]
    )


def test_a_metric_of_verls_filter_that_is_unknown_is_left_to_a_person(tmp_path: Path):
    text = (
        MODEL_AND_ROWS
        + "algorithm.filter_groups.enable=True algorithm.filter_groups.metric=length\n"
    )
    limit, metric = import_verl(overrides(tmp_path, text)).leftovers["choice"]
    assert "algorithm.max_resample_rounds" in limit
    assert "metric=length" in metric
    assert "algorithm.filter_metric" in metric


def test_verl_tool_keys_and_what_only_a_shell_knows(tmp_path: Path):
    text = (
        "host=$(hostname -i)\n"
        "url=http://$host:5000/get_observation\n"
        "python -m verl_tool.trainer.main_ppo \\\n"
        "  actor_rollout_ref.agent.max_turns=10"
        " actor_rollout_ref.agent.tool_server_url=$url \\\n"
        "  " + MODEL_AND_ROWS
    )
    imported = import_verl(overrides(tmp_path, text))
    assert imported.values["agent.max_turns"] == 10
    assert "agent.tool_server_url" not in imported.values
    assert imported.leftovers["choice"] == [
        "run.sh:4: actor_rollout_ref.agent.tool_server_url=http://$(hostname"
        " -i):5000/get_observation: the file does not define $(hostname -i)"
    ]


def test_the_folder_that_the_script_runs_in_is_the_one_that_training_runs_in(tmp_path: Path):
    text = (
        'DIR="$(pwd)"\npython -m verl.trainer.main_ppo actor_rollout_ref.model.path=$PWD/m \\\n'
        "  data.train_files=[$(pwd)/a.parquet,`pwd`/b.parquet] \\\n"
        '  actor_rollout_ref.rollout.multi_turn.tool_config_path="$DIR/tools.yaml"\n'
    )
    values = import_verl(overrides(tmp_path, text)).values
    assert values["model.path"] == "./m"
    assert values["tools.tool_config_path"] == "./tools.yaml"
    assert values["data.train"] == ["./a.parquet", "./b.parquet"]


def test_a_name_that_only_a_shell_knows_is_listed_once(tmp_path: Path):
    imported = import_verl(
        overrides(tmp_path, MODEL_AND_ROWS + "trainer.experiment_name=run-$(date)\n")
    )
    assert imported.leftovers == {
        "choice": ["run.sh:2: trainer.experiment_name=run-$(date): set run_dir"]
    }


def test_settings_of_another_engine_need_a_decision(tmp_path: Path):
    text = (
        MODEL_AND_ROWS
        + "actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.max_num_seqs=8\n"
    )
    imported = import_verl(overrides(tmp_path, text))
    assert "unknown" not in imported.leftovers
    assert "rollout.vllm.max_num_seqs" not in imported.values
    assert "max_num_seqs=8: a setting of vLLM" in imported.leftovers["choice"][1]


def test_agentfly_keys_are_translated(tmp_path: Path):
    text = (
        MODEL_AND_ROWS + "agent.use_agent=True agent.num_chains=5 agent.max_turns=4"
        " agent.init_config.max_model_len=16384\nagent.init_config.tool_parser_name=hermes"
        " agent.init_config.tools=[search]\n"
    )
    imported = import_verl(overrides(tmp_path, text))
    assert imported.values["rollout.group_size"] == 5
    assert imported.values["agent.max_assistant_turns"] == 4
    assert imported.values["rollout.max_model_len"] == 16384
    assert imported.values["agent.tool_format"] == "hermes"
    assert [line.split(": ")[1] for line in imported.leftovers["choice"]] == [
        "agent.init_config.tools=['search']"
    ]


def test_mini_batches_that_do_not_divide_the_batch_need_a_choice(tmp_path: Path):
    text = (
        MODEL_AND_ROWS + "data.train_batch_size=100 actor_rollout_ref.actor.ppo_mini_batch_size=48"
    )
    imported = import_verl(overrides(tmp_path, text))
    assert "learner.num_minibatches" not in imported.values
    assert "not a multiple" in imported.leftovers["choice"][0]


def test_yaml_references_are_resolved(tmp_path: Path):
    text = "data: {max_prompt_length: 64}\nrollout:\n  prompt_length: ${data.max_prompt_length}\n"
    read = overrides(tmp_path, text, "verl.yaml")
    assert read["rollout.prompt_length"].value == 64
    assert read["rollout.prompt_length"].where == "verl.yaml:3"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("x=1\na.b='open\n", {"key": "run.sh:2", "value": '"\'"'}),
        ("\na.b=[1\n", {"key": "run.sh:2", "value": "a.b=[1", "fix": "YAML"}),
        (
            "python -m verl.trainer.main_ppo a.b=1\npython -m verl.trainer.main_ppo a.b=2\n",
            {"key": "run.sh:2", "value": "second"},
        ),
    ],
)
def test_an_error_names_the_line(tmp_path: Path, text: str, named: dict):
    with raises(ConfigError, **named):
        overrides(tmp_path, text)


def test_a_script_without_a_model_is_refused(tmp_path: Path):
    with raises(ConfigError, key="actor_rollout_ref.model.path"):
        import_verl(overrides(tmp_path, "data.train_files=rows.parquet"))


def test_nothing_is_run(tmp_path: Path):
    overrides(tmp_path, f"x=$(touch {tmp_path}/made)\na.b=`touch {tmp_path}/made`\n")
    assert not (tmp_path / "made").exists()


VALIDATION = "actor_rollout_ref.rollout.val_kwargs."


def test_evaluations_are_greedy_unless_verls_are_sampled_at_a_temperature(tmp_path: Path):
    sampled = MODEL_AND_ROWS + f"data.val_files=rows.parquet {VALIDATION}do_sample=True\n"
    imported = import_verl(overrides(tmp_path, sampled))
    assert build(yaml.safe_load(as_yaml(imported))).rollout.eval_temperature == 0
    (leftover,) = imported.leftovers["same"]
    assert leftover.startswith(f"run.sh:2: {VALIDATION}do_sample=True: ")

    warm = sampled + f"{VALIDATION}temperature=0.6\n"
    text = as_yaml(import_verl(overrides(tmp_path, warm)))
    source = f"{VALIDATION}temperature, {VALIDATION}do_sample"
    assert f"eval_temperature: 0.6  # {source}" in text

    greedy = warm.replace("True", "False")
    imported = import_verl(overrides(tmp_path, greedy))
    assert "rollout.eval_temperature" not in imported.values
    assert f"{VALIDATION}temperature=0.6" in imported.leftovers["no effect"][0]


def test_comments_name_the_key_that_holds_the_value(tmp_path: Path):
    text = (
        MODEL_AND_ROWS + "algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.01"
        " algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False\n"
    )
    sources = import_verl(overrides(tmp_path, text)).sources
    assert sources["algorithm.kl.where"] == "algorithm.use_kl_in_reward"
    assert sources["algorithm.kl.coef"] == "algorithm.kl_ctrl.kl_coef"
    assert sources["algorithm.kl.estimator"] == "verl's default of algorithm.kl_penalty"
    assert "algorithm.norm_adv_by_std_in_grpo" in sources["algorithm.adv_estimator"]


def test_epochs_need_a_decision_unless_steps_are_given(tmp_path: Path):
    text = MODEL_AND_ROWS + "trainer.total_epochs=15 trainer.total_training_steps="
    assert "no effect" in import_verl(overrides(tmp_path, text + "9\n")).leftovers
    (leftover,) = import_verl(overrides(tmp_path, text + "null\n")).leftovers["choice"]
    assert "trainer.total_epochs=15: set trainer.steps" in leftover


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("actor_rollout_ref.rollout.agent.agent_loop_config_path", "@register_agent"),
        ("data.custom_cls.path", "data.train"),
        (f"{VALIDATION}n", "eval mine.yaml -n"),
        ("actor_rollout_ref.rollout.agent.num_workers", "event loop"),
        ("actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode", "never tokenized"),
    ],
)
def test_common_keys_without_a_counterpart_have_advice(tmp_path: Path, key: str, advice: str):
    leftovers = import_verl(overrides(tmp_path, MODEL_AND_ROWS + f"{key}=2\n")).leftovers
    assert "unknown" not in leftovers
    ((line,),) = leftovers.values()
    assert advice in line


READ_TOGETHER = {
    "algorithm.adv_estimator": ["gae", "grpo"],
    "algorithm.norm_adv_by_std_in_grpo": [True, False],
    "actor_rollout_ref.actor.use_kl_loss": [True, False],
    "actor_rollout_ref.actor.kl_loss_coef": [0, 0.001],
    "actor_rollout_ref.actor.kl_loss_type": ["low_var_kl", "k3+", 5],
    "algorithm.use_kl_in_reward": [True, False],
    "algorithm.kl_penalty": ["kl", "abs"],
    "algorithm.kl_ctrl.type": ["fixed", "adaptive"],
    "algorithm.kl_ctrl.kl_coef": [0, 0.01],
    "algorithm.kl_ctrl.target_kl": [0.1],
    "algorithm.kl_ctrl.horizon": [100],
    "algorithm.filter_groups.enable": [True, False],
    "algorithm.filter_groups.metric": ["acc", "score", "length"],
    "algorithm.filter_groups.max_num_gen_batches": [0, 3],
    "reward_model.overlong_buffer.enable": [True, False],
    "reward_model.overlong_buffer.len": [16],
    "reward_model.overlong_buffer.penalty_factor": [0.5],
    "reward_model.overlong_buffer.log": [True],
    "custom_reward_function.path": ["a.py"],
    "custom_reward_function.name": ["compute_score", "other"],
    "reward.custom_reward_function.path": ["b.py"],
    "data.prompt_key": ["prompt", "question"],
    "data.val_files": ["rows.parquet"],
    "data.truncation": ["error"],
    f"{VALIDATION}do_sample": [True, False],
    f"{VALIDATION}temperature": [0.6],
    f"{VALIDATION}n": [1, 4],
    "actor_rollout_ref.rollout.name": ["vllm", "sglang"],
    "actor_rollout_ref.rollout.max_num_seqs": [8],
    "actor_rollout_ref.rollout.multi_turn.enable": [True, False],
    "actor_rollout_ref.rollout.agent.default_agent_loop": ["tool_agent"],
    "actor_rollout_ref.rollout.n": [4],
    "agent.num_chains": [2],
    "actor_rollout_ref.actor.optim.betas": [[0.9, 0.99], [0.9]],
    "actor_rollout_ref.actor.ppo_mini_batch_size": [256, 100],
    "actor_rollout_ref.model.lora_rank": [0, 8],
    "actor_rollout_ref.model.lora_alpha": [16],
    "actor_rollout_ref.model.target_modules": ["all-linear"],
    "critic.optim.lr": [1e-5],
    "trainer.total_epochs": [15],
    "trainer.total_training_steps": [20],
    "trainer.logger": ["console", ["console", "wandb"], "mlflow"],
    "trainer.project_name": ["p"],
    "trainer.default_local_dir": ["runs/a"],
    "trainer.experiment_name": ["b"],
    "trainer.max_actor_ckpt_to_keep": [3],
    "trainer.remove_previous_ckpt_in_save": [True, False],
    "foo.bar": [1],
}


def chosen_overrides(draw: st.DrawFn) -> dict[str, Override]:
    keys = draw(st.lists(st.sampled_from(sorted(READ_TOGETHER)), unique=True))
    values = {"actor_rollout_ref.model.path": "m", "data.train_files": "rows.parquet"}
    for key in keys:
        values[key] = draw(st.sampled_from([*READ_TOGETHER[key], None]))
    return {
        key: Override(key=key, value=value, where=f"run.sh:{line}")
        for line, (key, value) in enumerate(values.items(), 1)
    }


@settings(max_examples=60, deadline=None)
@given(st.composite(chosen_overrides)())
def test_every_key_is_in_a_comment_or_in_one_line_of_the_report(given_keys: dict[str, Override]):
    imported = import_verl(given_keys)
    in_comments = set()
    for line in as_yaml(imported).splitlines():
        in_comments.update(line.partition("  # ")[2].split(", "))
    report = [line for lines in imported.leftovers.values() for line in lines]

    for key, override in given_keys.items():
        lines = [line for line in report if line.startswith(f"{override.where}: {key}=")]
        assert len(lines) <= 1
        assert lines or key in in_comments


KEYS = st.from_regex(r"[a-z]{1,4}(\.[a-z_]{1,6}){1,3}", fullmatch=True)
VALUES = st.one_of(st.integers(), st.booleans(), st.text("abc xyz'\"$#\\&|;(){}`=~", max_size=12))


def quoted(word: str, how: str) -> str:
    if how == "double":
        return '"' + "".join(f"\\{c}" if c in '"$`\\' else c for c in word) + '"'
    return shlex.quote(word)


@given(
    st.dictionaries(
        KEYS, st.tuples(VALUES, st.sampled_from(["single", "double"])), min_size=1, max_size=6
    )
)
def test_any_overrides_are_read_back_in_any_quoting(tmp_path_factory, mapping):
    words = [
        quoted(f"{key}={yaml.safe_dump(value, default_flow_style=True, width=1000)}", how)
        for key, (value, how) in mapping.items()
    ]
    file = tmp_path_factory.mktemp("script") / "run.sh"
    file.write_text("python -m verl.trainer.main_ppo \\\n  " + " \\\n  ".join(words) + "\n")
    assert {key: override.value for key, override in read_overrides(file).items()} == {
        k: v for k, (v, _) in mapping.items()
    }


PAGE = (DOCS / "moving" / "verl.md").read_text()
OF_AGENTFLY = (DOCS / "moving" / "agentfly.md").read_text()


def rows(page: str) -> list[list[str]]:
    lines = [line for line in page.splitlines() if line.startswith("| `")]
    return [line.split("|")[1:3] for line in lines if line.count("|") == 3]


@pytest.mark.parametrize(
    ("theirs", "ours", "page"),
    [
        *((*pair, PAGE) for pair in [*SAME.items(), *VLLM.items()]),
        *((*pair, OF_AGENTFLY) for pair in AGENTFLY.items()),
    ],
    ids=lambda value: value if len(value) < 100 else "",
)
def test_the_page_lists_every_key_that_carries_over(theirs: str, ours: str, page: str):
    assert ours in valid_keys(Config)
    leaf = theirs.rpartition(".")[2]
    assert any(f"{leaf}`" in row[0] and f"`{ours}`" in row[1] for row in rows(page))


def test_the_pages_arguments_for_a_laptop_fit_a_translated_script(tmp_path: Path):
    command = PAGE.split("jax-agent-rl train mine.yaml ")[1].split("```")[0]
    arguments = command.replace("\\\n", " ").split()
    for line in PAGE.splitlines():
        if line.startswith(("| data.eval |", "| rollout.backend: vllm |", "| trainer.logger |")):
            arguments += line.split("`")[1].split()
    file = tmp_path / "mine.yaml"
    file.write_text(as_yaml(import_verl(overrides(tmp_path, GRPO))))

    config = load(file, arguments)

    assert config.rollout.backend == "jetstream"
    assert config.rollout.max_model_len == 768
    assert config.data.eval == config.data.train


def test_the_page_lists_the_defaults_that_are_written():
    rows = {}
    for line in PAGE.splitlines():
        if line.count("|") == 5 and line.startswith("| `"):
            rows[line.split("`")[1]] = line.split("|")[2].strip()
    for key, value in DEFAULTS.items():
        assert rows[key].split(" ")[0] == (
            str(value).lower() if isinstance(value, bool) else str(value)
        )
