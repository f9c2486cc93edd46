"""What `benchmarks/decode.py` and `benchmarks/gpu.py` are made of."""
