"""Training without rollouts.

``conversations`` from rows to token ids and loss masks · ``train`` the loop of sft and dpo.
"""
