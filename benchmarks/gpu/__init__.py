"""Everything that a lent GPU is asked, in the order of what it teaches, into one folder."""
