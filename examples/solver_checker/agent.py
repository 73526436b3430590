"""A solver answers a question, a checker says whether an answer is right: the solver's, or another
one.
"""

from __future__ import annotations

import random
from dataclasses import replace

from jax_agent_rl.agents import AgentLoop, register_agent
from jax_agent_rl.rewards.rules import last_number
from jax_agent_rl.types import FinishReason


@register_agent("solver_checker")
class SolverChecker(AgentLoop):
    """One turn each; the checker reads the question and an answer, but not how the solver was
    asked.

    Half of the answers the checker reads are right, however good the solver is: otherwise the
    verdict that is right more often, whatever the answer, is all the checker would learn.
    """

    roles = ("solver", "checker")

    async def play(self, request):
        row = request.row
        extra = row["extra_info"]
        truth = row["reward_model"]["ground_truth"]
        solver = self.start(request.as_role("solver"))
        await solver.generate(session_ends=True, max_tokens=12)
        answer = solver.read_turn().content

        # The solver's answer is replaced where it is not what the draw asks for.
        draw = random.Random(request.trajectory_id)
        is_right = last_number(answer) == last_number(truth)
        shall_be_right = draw.random() < 0.5
        if shall_be_right and not is_right:
            answer = truth
        elif is_right and not shall_be_right:
            answer = str(int(truth) + draw.choice((-10, -2, -1, 1, 2, 10)))

        claim = {"role": "user", "content": f"{extra['question']} {answer}"}
        checker_row = {
            **row,
            "prompt": [*extra["checker_prompt"], claim],
            "extra_info": {"answer": answer},
        }
        checker = self.start(replace(request, row=checker_row).as_role("checker"))
        await checker.generate(session_ends=True, max_tokens=4)
        return [solver.finish(FinishReason.ANSWER), checker.finish(FinishReason.ANSWER)]
