"""What a config implies: names, shapes and roles of tensors."""
