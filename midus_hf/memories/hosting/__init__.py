"""How layers host memories: sites, and what a pass gives to memories."""
