"""Agreement between engine and learner as a contract: how close they have to be, and what is wrong if they are not.

::

    tolerances    how far log-probs of the same weights may be apart, by engine and precision
    contexts      the trajectories a diagnosis looks at
    forward       the model once more, plainly, under any setting that might explain a gap
    hypotheses    the settings worth a try, and what each leaves unexplained
    tensors       the engine's weights beside the learner's, by name
    layers        the engine's activations beside the learner's, from the embeddings on
    diagnosis     all of it, in order of how much each would say
    report        for people, and for the run folder
"""
