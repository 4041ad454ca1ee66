"""Benchmarks, one file per op."""
