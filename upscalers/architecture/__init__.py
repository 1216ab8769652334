"""Names, shapes and roles of tensors that a config implies."""
