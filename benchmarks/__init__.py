"""Speed, memory and accuracy, measured; results are rows of tracked CSV files, and tables are made from those alone."""
