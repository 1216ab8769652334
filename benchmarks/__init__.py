"""Benchmarks of speed, memory and accuracy. Results are rows of tracked CSV files, from which all tables are made."""
