"""Read memories from configs without torch or transformers: types, options, tensors and sites."""
