"""Benchmarks of speed, memory and accuracy. Results are rows of tracked CSV files, and all tables are made from these files."""
