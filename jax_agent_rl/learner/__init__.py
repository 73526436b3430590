"""The learner, in the order in which data flows through it.

::

    learner            the update, stage by stage; its docstring draws the pipeline
    packing            groups into mini-batches, trajectories into rows that share prefixes (batch)
      image_packing    the images of rows
    scoring            forward passes over packed rows
    teachers           frozen models that score what the policy sampled
    experience         what each token contributes: advantages/, correction
    losses/            policy losses by name, KL, aggregation: weights of tokens
    programs           everything that is compiled, from shapes alone
      objective        the policy's loss; linear_logprobs: log-probs
      critic           the critic and its loss
      parameterization trained and frozen parameters, adapters, mixed precision
    sequence_learner   training on given sequences instead of groups: one call each for forward,
                       gradient and update
      sequences        what is trained on, and what each of its tokens contributes
    optimized_params   parameters with their optimizer: gradients and updates
      optimizer        AdamW, Muon, Adafactor; learning-rate schedules; undoing an update
    comparison         engine and learner are compared before a step's first update
    cancellation       whether an interrupted step is undone or finished
    undo               the state before a step, kept until its updates are all done
    metrics            the result of an update
    checkpoint         states on disk
"""
