"""What `benchmarks/gpu_check.sh` runs on a lent GPU, one file per section."""
