"""Agreement between engine and learner: how close their log-probs must be, and what separates them.

::

    subject       the contexts of a diagnosis, and the learner's model to score them
    forward       the learner's model without packing, under any setting that might explain a gap
    logits        log-probs from hidden states, under other temperatures, supports and penalties
    report        tolerances, causes with advice, results for people and for the run folder
    variations    other values of a model config's fields
    hypotheses    settings that might explain a gap, as trials to be scored
    readings      hypotheses about what follows the last hidden states
    search        trials within a time limit, and confirmation of the best
    inspection    the engine's weights and activations compared with the learner's
    diagnosis     all of it, in order of how much each says
"""
