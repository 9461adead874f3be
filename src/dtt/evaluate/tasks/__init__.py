"""Benchmark tasks: definitions, questions, scores and result files."""
