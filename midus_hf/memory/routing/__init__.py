"""Routing of texts to chapters: pooling of tokens, stretches of tokens, and the routers' losses and reports."""
