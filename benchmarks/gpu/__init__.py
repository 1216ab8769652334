"""All measurements on a lent GPU, the most informative first, with results in one folder."""
