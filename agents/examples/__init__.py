"""Runnable examples of the agents outside federated learning."""
