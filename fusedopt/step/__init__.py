"""One update: complete gradients in, new model parameters out."""
