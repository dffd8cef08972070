"""Adapters to training libraries, each imported by the user who has the library.

fusedopt itself imports none of them, and they import their library inside functions.
"""
