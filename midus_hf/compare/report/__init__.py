"""What a comparison found, told: sentences, tables, pictures, one page, and files for other programs."""
