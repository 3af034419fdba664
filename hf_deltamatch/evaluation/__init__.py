"""Evaluation with lm-eval: its command with our model and task groups, comparisons, released models."""
