"""How texts are routed to chapters: what is pooled of which tokens, and what routers tell and lose."""
