"""Fitting drafters to a target by texts that the target itself wrote."""
