"""Kuhn poker between two players, each of whom sees only its own card."""

from __future__ import annotations

import re

from jax_agent_rl.agents import AgentLoop, Episode, register_agent
from jax_agent_rl.errors import TrajectoryError
from jax_agent_rl.types import FinishReason

RANKS = ("Jack", "Queen", "King")
ILLEGAL = -3.0
"""What an illegal move costs: more than any legal one can."""
MOVES = {
    (): ("You begin.", ("check", "bet")),
    ("check",): ("Your opponent checks.", ("check", "bet")),
    ("bet",): ("Your opponent bets.", ("fold", "call")),
    ("check", "bet"): ("Your opponent bets.", ("fold", "call")),
}
"""For every history in which somebody has to move: the situation, and the legal moves."""


@register_agent("kuhn_poker")
class KuhnPoker(AgentLoop):
    """One game; a trajectory per player, of the moves it made."""

    roles = ("first", "second")

    async def play(self, request):
        cards = request.row["extra_info"]["cards"]
        history: tuple[str, ...] = ()
        players: dict[str, Episode] = {}
        while history in MOVES:
            situation, legal = MOVES[history]
            role = self.roles[len(history) % 2]
            question = f"{situation} {legal[0]} or {legal[1]}?"
            if role not in players:
                message = {"role": "user", "content": f"You hold the {cards[role]}. {question}"}
                players[role] = self.start(request.as_role(role), opening=[message])
            elif not players[role].append([{"role": "user", "content": question}]):
                raise TrajectoryError("no room for another move; raise agent.max_response_length")

            await players[role].generate(max_tokens=8)
            words = re.findall(r"[a-z]+", players[role].read_turn().content.lower())
            if not words or words[0] not in legal:
                scores = {role: ILLEGAL}
                break
            history = (*history, words[0])
        else:
            won = payoff(cards["first"], cards["second"], history)
            scores = {"first": won, "second": -won}

        for role, player in players.items():
            player.add_score(scores.get(role, 0.0))
        return [player.finish(FinishReason.ENVIRONMENT_DONE) for player in players.values()]


def payoff(first: str, second: str, history: tuple[str, ...]) -> float:
    """What the first player wins of the second: an ante of 1 each, and a bet of 1."""
    if history[-1] == "fold":
        return 1.0 if len(history) % 2 == 0 else -1.0
    stake = 2.0 if history[-1] == "call" else 1.0
    return stake if RANKS.index(first) > RANKS.index(second) else -stake
