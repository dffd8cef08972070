"""From what autograd delivers to a complete, clipped gradient."""
