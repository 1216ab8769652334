"""Count which slots memories retrieve, and which blocks texts fetch."""
