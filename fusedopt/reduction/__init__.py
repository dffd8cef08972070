"""Gradients to the sum over ranks, parameters back to all of them."""
