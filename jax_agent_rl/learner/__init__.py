"""The learner, in the order in which data flows through it.

::

    learner            the update, stage by stage; its docstring draws the pipeline
    scoring            pack groups into mini-batches; forward passes over them
    teachers           frozen models that score what the policy sampled
      packing          rows that share prefixes (batch, with given sequences)
      image_packing    the images of rows
    experience         what each token contributes: advantages/, correction
    losses/            policy losses by name, KL, aggregation: weights of tokens
    programs           everything that is compiled, from shapes alone
      objective        the policy's loss; linear_logprobs: log-probs
      critic           the critic and its loss
      parameterization trained and frozen parameters, adapters, mixed precision
    sequence_learner   training on given sequences instead of groups: one call each for forward,
                       gradient and update
    optimized_params   parameters with their optimizer: gradients and updates
      optimizer        AdamW, Muon, Adafactor; learning-rate schedules; undoing an update
    cancellation       whether an interrupted step is undone or finished
    metrics            the result of an update; comparison with the engine
    checkpoint         states on disk
"""
