"""The doctor: checks for what would stop or spoil a run, and what to do about it.

``command`` the checks in order · ``machine`` how checks run and report, and the checks that need no
configuration · ``run`` checks of a configuration, which call what ``train`` calls before its first
step.
"""
