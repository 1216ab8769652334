"""Packs: keys and values of texts, which tokens attend to from a name on."""
