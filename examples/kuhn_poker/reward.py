"""The reward of a player: its winnings. Its accuracy: whether every move was legal and none was a
blunder.
"""

from jax_agent_rl.rewards import answer_of, register_reward

BLUNDERS = {("King", "fold"), ("Jack", "call")}
"""Moves that lose against every opponent: nothing beats a King, and a Jack beats nothing."""


@register_reward("kuhn_poker")
def compute_score(turn_scores, messages, num_turns, role, cards):
    """Return the payoff, which stands at the player's last move; illegal moves cost 3."""
    (won,) = turn_scores
    moves = [answer_of(m["content"]).strip().lower() for m in messages if m["role"] == "assistant"][
        -num_turns:
    ]
    legal = won > -3
    sound = legal and BLUNDERS.isdisjoint((cards[role], move) for move in moves)
    return {"score": won, "accuracy": float(sound), "legal": float(legal)}
