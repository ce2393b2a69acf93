"""Does the rest with a model: bench, profile, fit predictors, plan, score."""
