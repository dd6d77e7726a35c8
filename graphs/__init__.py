"""What a compiled, captured graph is: ops, tracing, programs, kinds and capture."""
