"""Layers that add weight gradients to main_grad themselves."""
