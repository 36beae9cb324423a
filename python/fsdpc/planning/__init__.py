"""Predictions about a run: memory plans, estimates, simulations, schedules, and their pictures."""
