"""Which rank holds what, and how ranks talk: layouts, groups, collectives, DTensors."""
