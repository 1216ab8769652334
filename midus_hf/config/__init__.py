"""Read memories from configs without importing torch or transformers: types, options, tensors and sites.

The package also has code that all other packages share: options in YAML, plugins and phrases of error messages.
"""
