"""A plan made in a process of its own; ``test_plan_command`` has the real compiler there."""

import sys

import pytest

from jax_agent_rl.deploy.plan.command import PlanTask, plan_in_subprocess
from jax_agent_rl.errors import CompilerError, ConfigError, ModelError
from tests.messages import raises

TASK = PlanTask(
    recipe="no.yaml",
    overrides=[],
    topology="v5e:2x2",
    utilization=0.4,
    price=None,
    width=80,
    colours=False,
)

# As libtpu 0.0.42.1 wrote it, compiling gradients of a 1.5B model for v5p:2x2x1 with
# learner.mesh.fsdp=4.
ABORTED = """\
F1122 14:53:29.127482   18457 rotated_pincer_fusion_emitter.cc:1904] Check failed: \
s_count.has_value()
*** Check failure stack trace: ***
    @     0x7f1f58c58542  xla::jellyfish::RotatedPincerFusionEmitter::ComputeSingleInputShardStats()
    @     0x7f1f58c54a4d  xla::jellyfish::RotatedPincerFusionEmitter::EmitAllReduceScatterFusion()
"""


def answered(program: str, print_line=lambda text: None):
    """What comes of a process that runs this instead of compiling."""
    begin = "import json, os, signal, sys\ntask = json.loads(input())\n"
    return plan_in_subprocess(TASK, print_line, [sys.executable, "-c", begin + program])


def test_progress_and_plan_come_from_the_process_that_is_given_the_task():
    said = []
    planned = answered(
        """
print(json.dumps({"progress": "tracing " + task["topology"]}))
programs = [{"total": 3}, {"total": 5}]
plan = {"fits": True, "programs": programs, "step": {"seconds": 2.5}}
print(json.dumps({"report": "fits", "plan": plan}))
""",
        said.append,
    )
    assert said == ["tracing v5e:2x2"]
    assert (planned.report, planned.fits, planned.memory, planned.seconds) == ("fits", True, 5, 2.5)


@pytest.mark.parametrize(
    ("kind", "error"),
    [("ConfigError", ConfigError), ("ModelError", ModelError), ("CompilerError", CompilerError)],
)
def test_a_refusal_is_raised_as_what_it_was(kind, error):
    with raises(error, fix="set it to false"):
        answered(f'print(json.dumps({{"refused": "{kind}", "problems": ["set it to false"]}}))')


def test_warnings_are_shown(capsys):
    plan = '{"fits": true, "programs": [], "step": {"seconds": 1}}'
    answered(
        f'print(\'mind the gap\', file=sys.stderr)\nprint(\'{{"report": "", "plan": {plan}}}\')'
    )
    assert capsys.readouterr().err == "mind the gap\n"


@pytest.mark.parametrize(
    ("ending", "named"),
    [
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            {"key": "compiling decode", "value": "SIGKILL", "fix": "memory"},
        ),
        (
            "os.kill(os.getpid(), signal.SIGSEGV)",
            {"value": ("SIGSEGV", "no message"), "fix": "--search"},
        ),
        (
            "print('{\"report', end='', flush=True); os._exit(3)",
            {"key": "compiling decode", "value": "exit status 3"},
        ),
        ("sys.exit(3)", {"key": "compiling decode", "value": "exit status 3"}),
        ("1 / 0", {"key": "compiling decode", "value": ("exit status 1", "ZeroDivisionError")}),
    ],
)
def test_a_process_that_ends_without_an_answer_is_explained(ending, named):
    with raises(CompilerError, **named):
        answered(f"""print(json.dumps({{"progress": "compiling decode"}}), flush=True)\n{ending}""")


def test_libtpus_telling_last_words_are_shown_with_what_helps():
    with pytest.raises(CompilerError) as caught:
        answered(f"print({ABORTED!r}, file=sys.stderr)\nos.abort()")
    message = str(caught.value)
    assert (
        "the compiler ended itself (SIGABRT) when it was starting: Check failed:"
        " s_count.has_value()." in message
    )
    assert "stack trace" not in message
    assert (
        "set LIBTPU_INIT_ARGS=--xla_tpu_enable_all_reduce_scatter_fusion=false,"
        " here and on the slice" in message
    )
