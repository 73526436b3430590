"""Agreement between engine and learner: how close their log-probs have to be, and what is wrong if they are not.

::

    subject       the contexts of a diagnosis, and the learner's model to score them
    forward       the learner's model without packing, under any setting that might explain a gap
    report        tolerances, causes with advice, results for people and for the run folder
    hypotheses    settings that might explain a gap, and the search for one wrong tensor
    inspection    the engine's weights and activations compared with the learner's
    diagnosis     all of it, in order of how much each says
"""
