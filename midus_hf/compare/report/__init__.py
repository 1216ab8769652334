"""Reports of a comparison: its findings as sentences, tables, pictures, one page, and files for other programs."""
