"""Compiler passes over traced torch.fx graphs."""
