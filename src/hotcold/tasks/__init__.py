"""Tasks with a model besides answering: bench, profile, fit predictors, plan, score."""
