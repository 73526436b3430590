"""Agreement between engine and learner as a contract: how close they have to be, and what is wrong if they are not.

::

    tolerances    how far log-probs of the same weights may be apart, by engine and precision
    causes        what can be wrong, with advice
    subject       the contexts of a diagnosis, and the learner's model to score them
    forward       the model once more, unpacked, under any setting that might explain a gap
    hypotheses    settings that might explain it, and the search for one wrong tensor
    inspection    the engine's weights and activations beside the learner's
    diagnosis     all of it, in order of how much each would say
    report        for people, and for the run folder
"""
