"""What to do with a model: from its modules to a list of decisions, each with its reason."""
