"""How a step's groups of trajectories are formed.

``collector`` one step's groups · ``stream`` groups that flow to an asynchronous trainer, through ``buffer``'s staleness
bound · ``strategies`` where a trajectory starts · ``filters`` and ``shaping`` what is trained on, with which reward ·
``accounting`` what became of every trajectory · ``lost_batches`` the end of a run that loses everything ·
``priority_slots`` who runs next.
"""
