"""What outlives a step: state dicts, copies, the whole on one rank."""
