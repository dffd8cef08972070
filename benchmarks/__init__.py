"""Benchmarks of fusedopt: `python -m benchmarks.run`; what each row means is in README.md beside this file."""
