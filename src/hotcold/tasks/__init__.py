"""Work with a model that is not generation: benchmarks, profiles, predictors, plans, scores."""
