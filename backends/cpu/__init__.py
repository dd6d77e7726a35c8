"""The processor of this machine: the embedded default."""
