"""Route texts to chapters: pool their tokens, cut stretches, and report what routers choose and lose."""
