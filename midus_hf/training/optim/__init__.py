"""What trains, in which groups, at which rates."""
