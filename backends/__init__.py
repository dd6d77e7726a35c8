"""Providers of ops and device graphs, one folder a device."""
