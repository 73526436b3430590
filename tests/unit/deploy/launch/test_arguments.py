"""Options of the launchers: what cannot be meant is refused before anything is asked or made."""

import argparse
import shlex
import sys

import pytest

from jax_agent_rl.deploy.launch.__main__ import main as gpu_main
from jax_agent_rl.deploy.launch.__main__ import parser as gpu_parser
from jax_agent_rl.deploy.launch.tpu.__main__ import main as tpu_main
from jax_agent_rl.deploy.launch.tpu.__main__ import parser as tpu_parser
from tests.launching import ROOT

TPU = ["--name", "try", "--zone", "us-west4-a", "--topology", "v5e:2x2"]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--slices", "0", "'0' is not a whole number, 1 or more"),
        ("--rollout-hosts", "two", "'two' is not a whole number, 1 or more"),
        ("--rollout-port", "99999999", "'99999999' is not a port, 1 to 65535"),
        ("--poll", "-1", "'-1' is not seconds, more than 0"),
        ("--poll", "nan", "'nan' is not seconds, more than 0"),
    ],
)
def test_a_value_that_tpu_pod_cannot_take_is_refused_with_its_form(
    option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        tpu_parser().parse_intermixed_args([*TPU, f"{option}={value}"])
    assert ended.value.code == 2
    assert f"argument {option}: {message}" in capsys.readouterr().err


def test_a_value_that_tpu_pod_can_take_is_taken():
    words = ["--slices=2", "--poll=0.5", "--rollout-port=65535"]
    parsed = tpu_parser().parse_intermixed_args([*TPU, *words])
    assert (parsed.slices, parsed.poll, parsed.rollout_port) == (2, 0.5, 65535)


def test_a_number_that_gpu_cannot_take_is_refused_with_its_form(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        gpu_parser().parse_args(["--max-restarts", "-1"])
    assert (
        "argument --max-restarts: '-1' is not a whole number, 0 or more" in capsys.readouterr().err
    )


@pytest.mark.parametrize("parser", [gpu_parser(), tpu_parser()], ids=lambda parser: parser.prog)
def test_help_shows_the_comment_of_the_script_and_all_options(parser: argparse.ArgumentParser):
    comment = (
        (ROOT / "launch" / parser.prog)
        .read_text()
        .partition("\nset -euo pipefail")[0]
        .splitlines()[1:]
    )
    text = parser.format_help()
    assert "\n".join(line.removeprefix("#").removeprefix(" ") for line in comment) in text
    assert "Exit status:" in text
    assert "--render" in text


def test_gpu_certifies_its_own_device_with_what_it_is_given(capsys: pytest.CaptureFixture[str]):
    assert (
        gpu_main(["--certify", "--dry-run", "--device", "cpu", "--config", "/my.yaml", "seed=3"])
        == 0
    )
    command = shlex.split(capsys.readouterr().out)
    python = [sys.executable, "-m", "jax_agent_rl.cli"]
    assert command == [
        "env",
        "JAX_PLATFORMS=cpu",
        *python,
        "certify",
        "--config=/my.yaml",
        "seed=3",
    ]


@pytest.mark.parametrize("option", ["--resume", "--render=ray"])
def test_certifying_begins_at_the_beginning_and_renders_nothing(
    option: str, capsys: pytest.CaptureFixture[str]
):
    assert gpu_main(["--certify", option]) == 1
    assert tpu_main([*TPU, "--certify", option.replace("ray", "sky")]) == 1
    assert capsys.readouterr().err.count("error: --certify measures") == 2


def test_gpu_refuses_to_certify_a_cluster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("RAY_ADDRESS", "http://10.0.0.1:8265")
    assert gpu_main(["--certify"]) == 1
    assert "unset RAY_ADDRESS" in capsys.readouterr().err
