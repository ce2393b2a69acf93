"""What is done with a model beside generating: bench, profile, fit predictors, plan, score."""
