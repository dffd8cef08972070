"""The flat memory: main_grad and main_param are views of it."""
