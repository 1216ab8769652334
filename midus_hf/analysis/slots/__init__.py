"""Which slots memories retrieve, and which blocks texts fetch."""
