"""Benchmarks: training speed, scale, fake quantisation, acceptance. None of them is a test."""
