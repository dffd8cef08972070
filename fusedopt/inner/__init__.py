"""What is known of, and done to, the wrapped optimizers."""
