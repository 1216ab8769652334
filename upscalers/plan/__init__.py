"""Where layers go, and what the config says of them."""
