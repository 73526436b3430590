"""How a step's groups of trajectories are collected.

- ``collector``: one step's groups.
- ``groups``: a group while it runs, and the stream of groups to an asynchronous trainer, through
  ``buffer``'s staleness bound.
- ``strategies``: where a trajectory starts.
- ``filters``: what is trained on, and penalties on its reward.
- ``priority_semaphore``: how many trajectories run at once.
- ``accounting``: what became of every trajectory, and the end of a run that loses all of them.
"""
