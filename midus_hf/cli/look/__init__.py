"""Commands that look inside a model: what its memories read, how its layers attend to the depth, what its chapters hold."""
