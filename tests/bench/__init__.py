"""Benchmarks: apart from the tests, because machines are noisy."""
