"""examples/minimal_grpo.py learns, accounts for every trajectory, and stays as small as it says."""

import inspect
import json
from pathlib import Path

from jax_agent_rl.config import Config
from jax_agent_rl.rewards import register_reward
from jax_agent_rl.testing.conformance.models import write_tiny_model
from jax_agent_rl.utils.plugins import load_user_module

FILE = Path(__file__).parents[2] / "examples" / "minimal_grpo.py"
example = load_user_module(str(FILE), key="example")


@register_reward("digits", override=True)
def share_of_digits(solution_str: str) -> float:
    return sum(letter.isdigit() for letter in solution_str) / max(len(solution_str), 1)


async def test_the_loop_learns_to_write_digits(tmp_path: Path, capsys):
    model = write_tiny_model(tmp_path / "model")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{% for m in messages %}{{ m.content }}<eos>{% endfor %}"
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    prompts = [f"{letter}{second_letter}?" for letter in "abcd" for second_letter in "efgh"]
    row = {
        "data_source": "digits",
        "agent_name": "single_turn_agent",
        "reward_model": {"ground_truth": ""},
    }
    rows = [row | {"prompt": [{"role": "user", "content": prompt}]} for prompt in prompts]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Config.model_validate(
        {
            "run_dir": str(tmp_path / "run"),
            "model": {"path": str(model)},
            "data": {"train": str(tmp_path / "train.jsonl")},
            "agent": {"tool_format": "hermes", "max_prompt_length": 16, "max_response_length": 16},
            "rollout": {
                "prompts_per_step": 4,
                "group_size": 8,
                "max_in_flight": 32,
                "max_model_len": 64,
                "jetstream": {
                    "max_concurrent_decodes": 32,
                    "prefill_buckets": [16],
                    "decode_steps": 4,
                },
            },
            "learner": {"learning_rate": 1e-2, "pack_length": 128},
            "trainer": {"steps": 8, "checkpoint_every": 0},
        }
    )
    rewards = await example.train(config)
    assert len(rewards) == 8
    assert rewards[-1] > rewards[0] + 0.2
    assert "groups learnt from" in capsys.readouterr().out


def test_it_is_one_function_of_at_most_150_lines_and_imports_nothing_private():
    source = FILE.read_text()
    assert len(source.splitlines()) <= 150
    assert [
        name
        for name, value in vars(example).items()
        if inspect.isfunction(value) and value.__module__ == example.__name__
    ] == ["train"]
    assert "import _" not in source
    assert "._" not in source
