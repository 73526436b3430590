"""Options of the launchers: what cannot be meant is refused before anything is asked or made."""

import argparse

import pytest

from jax_agent_rl.deploy.launch.__main__ import parser as gpu_parser
from jax_agent_rl.deploy.launch.tpu.__main__ import parser as tpu_parser
from tests.launching import ROOT

TPU = ["--name", "try", "--zone", "us-west4-a", "--topology", "v5e:2x2"]


@pytest.mark.parametrize(
    "option, value, message",
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
    assert ended.value.code == 2 and f"argument {option}: {message}" in capsys.readouterr().err


def test_a_value_that_tpu_pod_can_take_is_taken():
    given = ["--slices=2", "--poll=0.5", "--rollout-port=65535"]
    found = tpu_parser().parse_intermixed_args([*TPU, *given])
    assert (found.slices, found.poll, found.rollout_port) == (2, 0.5, 65535)


def test_a_number_that_gpu_cannot_take_is_refused_with_its_form(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        gpu_parser().parse_args(["--max-restarts", "-1"])
    assert "argument --max-restarts: '-1' is not a whole number, 0 or more" in capsys.readouterr().err


@pytest.mark.parametrize("parser", [gpu_parser(), tpu_parser()], ids=lambda parser: parser.prog)
def test_help_shows_the_comment_of_the_script_and_all_options(parser: argparse.ArgumentParser):
    comment = (ROOT / "launch" / parser.prog).read_text().partition("\nset -euo pipefail")[0].splitlines()[1:]
    text = parser.format_help()
    assert "\n".join(line.removeprefix("#").removeprefix(" ") for line in comment) in text
    assert "Exit status:" in text and "--render" in text
